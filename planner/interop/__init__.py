"""Files of other tools: import, export, adoption of running setups, and calibration."""
