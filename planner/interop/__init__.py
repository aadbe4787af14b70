"""Other tools: their layouts, machines and measurements read, and plans written for them.

A format is a file: ``megatron``, ``deepspeed``, ``torchtitan`` and ``torch_pipelining`` (layouts
and exports), ``nvidia_smi``, ``rocm_smi``, ``nccl_topology`` and ``nccl_tests`` (machines). Layouts
share ``layout``, ``arguments``, ``division`` and ``adopted``; exports share ``exported``; machines
share ``machines`` and ``imported``. ``calibration`` with ``calibrated_links`` takes costs from a
measured run, ``measured_costs`` from profiles.
"""
