package orphans

import (
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
)

func at(key string, epoch keys.Epoch) *version {
	return &version{[]byte(key), keys.MakeTrailer(epoch, keys.KindSet)}
}

func separator(key string, t keys.Trailer) *page.Separator {
	return &page.Separator{Key: []byte(key), Trailer: t}
}

// TestSeparatorsLeaveAnUnreadablePageWhatItMayHave: older versions of the last key before it belong to it, and where it ends is
// taken from nothing but its parent. Otherwise a version in it would read as absent, or the one after it as the newest.
func TestSeparatorsLeaveAnUnreadablePageWhatItMayHave(t *testing.T) {
	trailer := func(epoch keys.Epoch) keys.Trailer { return keys.MakeTrailer(epoch, keys.KindSet) }
	for _, c := range []struct {
		name        string
		left, right *version
		exact, want *page.Separator
	}{
		{"both readable", at("apple", 3), at("banana", 9), nil, separator("b", page.NoTrailer)},
		{"versions of one key", at("apple", 9), at("apple", 3), nil, separator("apple", trailer(9)-1)},
		{"out of order", at("b", 3), at("a", 9), nil, nil},
		{"before an unreadable page", at("apple", 3), nil, nil, separator("apple", trailer(3)-1)},
		{"after an unreadable page", nil, at("banana", 9), nil, nil},
		{"after one, as the parent had it", nil, at("banana", 9), separator("banana", trailer(20)-1), separator("banana", trailer(20)-1)},
		{"the parent contradicts the page after", nil, at("banana", 9), separator("c", page.NoTrailer), nil},
		{"the parent contradicts the page before", at("apple", 3), nil, separator("a", page.NoTrailer), nil},
		{"between two unreadable pages", nil, nil, nil, nil},
		{"between two, as the parent had it", nil, nil, separator("b", page.NoTrailer), separator("b", page.NoTrailer)},
	} {
		got, err := between(&top{id: 7, last: c.left}, &top{id: 8, first: c.right}, c.exact)
		if c.want == nil {
			if !errors.Is(err, errUnproved) {
				t.Errorf("%s: %v, %v; want a refusal", c.name, got, err)
			}
			continue
		}
		if err != nil || got.Compare(c.want.Key, c.want.Trailer) != 0 {
			t.Errorf("%s: %v, %v; want %v", c.name, got, err, *c.want)
		}
	}
}

// TestTopsOfNoLostNodeAreNotIgnored: every orphan is below a lost node. If one fits nowhere, a child of some node is missing.
func TestTopsOfNoLostNodeAreNotIgnored(t *testing.T) {
	lower, upper := separator("b", page.NoTrailer), separator("d", page.NoTrailer)
	leaf := func(id page.ID, key string) *top {
		v := at(key, 5)
		return &top{id: id, first: v, last: v, inside: v.separator()}
	}
	for _, c := range []struct {
		name string
		more *top
		ok   bool
	}{
		{"all fit", leaf(12, "cc"), true},
		{"one is outside the range", leaf(12, "e"), false},
		{"one is of another level", &top{id: 12, level: 1, inside: separator("cc", page.NoTrailer)}, false},
		{"one cannot be read", &top{id: 12, level: levelUnknown}, false},
	} {
		f := &finder{tops: map[page.ID]*top{10: leaf(10, "b"), 11: leaf(11, "c"), 12: c.more}}
		n := &lostNode{id: 3, level: 1, lower: lower, upper: upper}
		err := f.assignOpen([]*lostNode{n})
		if c.ok && (err != nil || len(n.children) != 3) || !c.ok && !errors.Is(err, errUnproved) {
			t.Errorf("%s: %d children, %v", c.name, len(n.children), err)
		}
	}
}

// TestOneSearchFindsABoundedNumberOfNodes: the rest is for the next search, and nothing of it counts as refused.
func TestOneSearchFindsABoundedNumberOfNodes(t *testing.T) {
	f := &finder{lost: []*lostNode{{id: 1, level: 1}}}
	for i := range page.ID(nodesMax + 500) {
		f.healed = append(f.healed, btree.RebuiltNode{ID: 10 + i, Level: 1 + int(i)/nodesMax})
	}
	found := f.result(nil)
	if len(found.Nodes) != nodesMax || found.Nodes[499].Level != 2 || found.Nodes[500].Level != 1 || len(found.Refused) > 0 {
		t.Errorf("%d nodes, %d refused", len(found.Nodes), len(found.Refused))
	}
}
