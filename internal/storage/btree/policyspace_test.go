package btree

import (
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

// TestTheStoresOwnRecordsKeepNoHistory: what the retention keeps of user data it does not keep of the records of the store.
func TestTheStoresOwnRecordsKeepNoHistory(t *testing.T) {
	p := Policy{MinVisible: 10, Snapshots: []keys.Epoch{10}, System: []keys.Epoch{15, 40}}
	epochs := []keys.Epoch{50, 40, 30, 15, 12, 8}
	for space, want := range map[keys.Space][]bool{
		keys.SpaceUser:   {true, true, true, true, true, true},
		keys.SpaceSystem: {true, true, false, true, false, false},
	} {
		if got := p.Retained(keys.Append(nil, space, []byte("k")), epochs); !slices.Equal(got, want) {
			t.Errorf("space %#x: %v, want %v", byte(space), got, want)
		}
	}
}
