"""Quality of plans and bounds after some CPU seconds: a frozen corpus, two builds side by side."""
