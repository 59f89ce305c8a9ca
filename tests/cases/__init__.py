"""Inputs that broke other FlexAttention implementations, as public reports describe them.

Each test is named after the number of its report in our list and says the symptom. Reports about
GPUs alone, speed, several processes or paged caches have their tests elsewhere or none yet.
"""
