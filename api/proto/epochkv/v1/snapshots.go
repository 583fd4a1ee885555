package epochkvv1

import "strings"

// Name is the kind as people read it: "scan", "resume-token".
func (x SnapshotInfo_Kind) Name() string {
	return strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(x.String(), "KIND_"), "_", "-"))
}
