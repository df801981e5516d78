PLANNER_PROMPT="Plan: {question}"
ROLE="planner"
