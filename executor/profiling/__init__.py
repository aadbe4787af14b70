"""Measuring what each layer of a model costs on this device, one layer at a time.

``python -m executor.profiling MODEL`` writes a costs file for ``pipeplan plan --costs``.
"""
