"""Plans for people: Gantt charts, memory plots, Perfetto traces and tables of a timeline."""
