"""What code in a box cannot do: SECURITY.md, tried."""
