"""Where checkpoints lie: folders of file systems and of stores."""
