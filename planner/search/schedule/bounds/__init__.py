"""Lower bounds that hold for every schedule of given stages."""
