"""Public profiles and instances read into layer graphs, clusters and jobs: `pipeplan import`.

Hands out ``formats.import_file`` and what it takes and returns: ``options.ImportOptions`` and
``imported.Imported``.
"""
