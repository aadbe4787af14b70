"""What CP-SAT decides: plans under the user's rules, conflicts of rules, and schedules of stages.

Without rules a dynamic program and a walk over whole plans find as good stages sooner, so the plan
model runs where a job has rules, or ``solve`` was given ``constrain=``: it finds a first plan that
keeps them, unlike starts for the walk, and better stages around a plan at which the walk is stuck.
Where no stages keep them, :mod:`planner.search.cp_sat.conflicts` names a smallest set of rules that
no plan can keep.
"""
