"""How much of the bounds of plans can anyone check, and how long does that take?"""
