"""The GPUs, the CPUs and the memory of this host, read without a framework and without a CUDA context; standard library only.

`nvml.py` asks the driver through nvidia-ml-py where that is installed, `kernel_files.py` reads what the driver's files say without
it, `visible.py` is CUDA_VISIBLE_DEVICES as CUDA reads it, `inventory.py` puts the answers together.
"""
