package storage

import (
	"encoding/hex"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

// TestRootsInTheSuperblockKeepTheirBytes: docs/formats.md says what they are.
func TestRootsInTheSuperblockKeepTheirBytes(t *testing.T) {
	var state pager.State
	encodeRepairTreeRoots(&state, btree.Root{ID: 0x1234, Level: 2}, btree.Root{ID: 0x5678, Level: 1})
	if got := hex.EncodeToString(state.Engine[:24]); got != "3412000000000000"+"03000000"+"7856000000000000"+"02000000" {
		t.Errorf("roots: %s", got)
	}
	if root, mirror, err := decodeRepairTreeRoots(&state); err != nil || root != (btree.Root{ID: 0x1234, Level: 2}) || mirror != (btree.Root{ID: 0x5678, Level: 1}) {
		t.Errorf("roots read as %v, %v, %v", root, mirror, err)
	}
	state.Engine[100] = 1
	if _, _, err := decodeRepairTreeRoots(&state); err == nil {
		t.Error("reserved bytes are not looked at")
	}
}
