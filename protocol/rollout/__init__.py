"""Rollout: traces of agents' sessions, groups of episodes, the replay buffer, who produces and who consumes."""
