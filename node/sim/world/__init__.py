"""What simulated processes run on: virtual time, a network with links, a directory, disks, devices,
numbers instead of tensors."""
