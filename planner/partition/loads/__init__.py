"""Placement of operator graphs so that the largest load of a device is least.

The problem of Tarnawski et al. 2020 ("Efficient algorithms for device placement of DNN graph
operators"): ``instance`` is its data, ``evaluator`` checks and scores any answer, ``solve`` finds
one and proves how good it is.
"""
