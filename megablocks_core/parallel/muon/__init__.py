"""Muon, over logical matrices."""
