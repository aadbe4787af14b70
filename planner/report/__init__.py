"""Plans for people: charts, Perfetto traces, tables, plain data and HTML pages."""
