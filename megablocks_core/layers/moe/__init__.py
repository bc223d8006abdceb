"""Mixture of experts: routers, dispatch, experts and losses, in any layout."""
