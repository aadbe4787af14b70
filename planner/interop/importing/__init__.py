"""Import of what other tools tell of machines as clusters: ``pipeplan import``.

The entry point is ``formats.import_cluster``, with ``imported.ImportOptions`` and
``imported.ImportedCluster``. ``megatron_layout`` and ``schedule_csv`` read stages and schedules.
"""
