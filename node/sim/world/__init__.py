"""The world of simulated processes: virtual time, a network with links, a directory, disks,
devices, numbers instead of tensors."""
