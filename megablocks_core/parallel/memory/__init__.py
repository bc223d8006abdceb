"""What backward needs: computed again, or kept in the host's memory."""
