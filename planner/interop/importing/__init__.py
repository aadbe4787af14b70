"""Import of files of other tools as layer graphs, jobs and clusters: ``pipeplan import``.

The entry points are ``formats.import_file`` for profiles, with ``imported.ImportOptions`` and
``imported.Imported``, and ``formats.import_cluster_file`` for links, with
``imported.ImportedCluster``.
"""
