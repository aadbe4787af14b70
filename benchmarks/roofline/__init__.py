"""How far predicted layer times are off where nothing is measured."""
