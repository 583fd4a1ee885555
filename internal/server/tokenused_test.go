package server

import (
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestATokenOfALongConnectionIsUsed: connections keep their callers, and the manager of users lets them be found anew every hour, so that a
// token in use is not taken for one that is not.
func TestATokenOfALongConnectionIsUsed(t *testing.T) {
	h, client, ann, bob := startWithUsers(t, vfs.NewMem())
	_, err := client.Enable(with(t, ann), &pb.EnableRequest{})
	must(t, err)
	get := func() {
		_, err := h.kv.Get(with(t, bob), &pb.GetRequest{Key: []byte("aa")})
		must(t, err)
	}
	get()
	table := h.gate.table.Load()
	id, err := h.gate.users.Bearer("Bearer " + bob)
	must(t, err)
	used := &table.Token(id.Token).LastUsed
	used.Store(1) // in 1970
	get()
	if used.Load() != 1 {
		t.Fatal("the caller is not kept")
	}
	same := *table.Table
	h.gate.publish(&same) // as users.Manager does every hour
	get()
	if used.Load() == 1 {
		t.Error("the token is not known to have been used")
	}
}
