"""What the machine has: memory now; bandwidths and kernels are measured by later versions."""
