"""Microbatch schedules against bounds and published schedules."""
