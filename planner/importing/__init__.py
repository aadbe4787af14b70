"""Public profiles and instances read into layer graphs, clusters and jobs: `pipeplan import`.

Hands out ``formats.import_file`` and what it takes and returns: ``options.ImportOptions`` and
``imported.Imported``; and for what other tools tell of links ``formats.import_cluster_file`` with
``imported_cluster.ImportedCluster``.
"""
