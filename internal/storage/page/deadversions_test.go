package page

import (
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

// TestDeadVersionRatioIsRoundedUp counts superseded versions and tombstones, in a leaf that begins a key and in
// one that continues it.
func TestDeadVersionRatioIsRoundedUp(t *testing.T) {
	value := make([]byte, 90)
	at := func(key string, e keys.Epoch, same bool) Entry {
		return Entry{Key: []byte(key), Trailer: keys.MakeTrailer(e, keys.KindSet), Value: value, Same: same}
	}
	tombstone := Entry{Key: []byte("kc"), Trailer: keys.MakeTrailer(1, keys.KindDelete)}
	for _, c := range []struct {
		name    string
		behind  bool
		want    DeadRatio
		entries []Entry
	}{
		{"nothing", false, 0, []Entry{at("ka", 9, false), at("kb", 5, false)}},
		{"one of two versions", false, 128, []Entry{at("ka", 9, false), at("ka", 5, true)}}, // 100 of 200 bytes
		{"all are continued", true, ratioWhole, []Entry{at("ka", 9, false), at("ka", 5, true)}},
		{"the first is continued", true, 128, []Entry{at("ka", 9, false), at("kb", 5, false)}},
		{"a tombstone", false, 14, []Entry{at("ka", 9, false), at("kb", 5, false), tombstone}}, // 11 of 213
	} {
		p := make([]byte, SizeDefault)
		BuildLeaf(p, 1, c.entries)
		if got := Leaf(p).DeadVersionRatio(c.behind); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
	p := make([]byte, SizeDefault)
	children := make([]Child, 50)
	for i := range children {
		children[i] = Child{ID: 7, Newest: keys.MaxEpoch, Separator: Separator{Key: []byte{byte(i)}, Trailer: NoTrailer}}
	}
	children[31].DeadVersions = 1
	BuildInner(p, 1, 1, children)
	node := Inner(p)
	if err := Verify(p); err != nil || node.DeadVersionRatio() != 1 || node.DeadVersions(31) != 1 || node.DeadVersions(30) != 0 || node.Newest(31) != keys.MaxEpoch {
		t.Errorf("share %d, of child 31 %d: %v", node.DeadVersionRatio(), node.DeadVersions(31), err)
	}
}
