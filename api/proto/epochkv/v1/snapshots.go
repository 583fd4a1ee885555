package epochkvv1

import "strings"

// Name is the kind as people read it: "scan", "resume-token".
func (x SnapshotInfo_Kind) Name() string {
	return strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(x.String(), "KIND_"), "_", "-"))
}

// Name is the state as people read it: "live", "lagging".
func (x WatchInfo_State) Name() string {
	return strings.ToLower(strings.TrimPrefix(x.String(), "STATE_"))
}
