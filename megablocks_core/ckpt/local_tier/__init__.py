"""Quick saves on the hosts' own disks, each part on several hosts."""
