package server

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/lease"
	"github.com/epochkv/epochkv/internal/vfs"
)

// flipLeafWith damages a leaf that has a text, the first or a later one.
func flipLeafWith(t *testing.T, disk *vfs.Mem, text string, which int) {
	t.Helper()
	const pageSize, leaf = 8192, 1
	f, err := disk.Open("data/data.ekv", vfs.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	page := make([]byte, pageSize)
	for at, n := int64(2*pageSize), 0; ; at += pageSize {
		if _, err := f.ReadAt(page, at); err != nil {
			t.Fatal(err)
		}
		if page[4] != leaf || !bytes.Contains(page, []byte(text)) {
			continue
		}
		if n++; n == which {
			page[pageSize/2] ^= 1
			if _, err := f.WriteAt(page, at); err != nil {
				t.Fatal(err)
			}
			break
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// againWithDamage starts the server again with a damaged leaf, and users that may do everything with their own keys.
func (h *harness) againWithDamage(t *testing.T, disk *vfs.Mem, text string, which int) (*harness, *clients) {
	t.Helper()
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}
	flipLeafWith(t, disk, text, which)
	h = mustStartOn(t, disk)
	h.setUsers(map[string][]auth.Grant{"alice": {grant("rwl", "a/")}, "mallory": {grant("rwl", "m/")}})
	return h, clientsOf(h.conn)
}

// TestAGrantTakesOverOnlyWhatTheCallerMayRevoke: a lease of which the record cannot be read has keys and locks of a user.
func TestAGrantTakesOverOnlyWhatTheCallerMayRevoke(t *testing.T) {
	const leases = 100
	disk, owner := vfs.NewMem(), strings.Repeat("owner of leases ", 15)
	h := mustStartOn(t, disk)
	c, ctx := clientsOf(h.conn), testContext(t)
	for id := uint64(1); id <= leases; id++ {
		if _, err := c.lease.GrantLease(ctx, &pb.GrantLeaseRequest{Id: id, Ttl: durationpb.New(time.Hour), Owner: owner}); err != nil {
			t.Fatal(err)
		}
		var err error
		if name := fmt.Appendf(nil, "a/%d", id); id%2 == 0 {
			_, err = c.kv.Put(ctx, &pb.PutRequest{Key: name, LeaseId: id})
		} else {
			_, err = c.lock.AcquireLock(ctx, &pb.AcquireLockRequest{Name: name, LeaseId: id})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	h, c = h.againWithDamage(t, disk, owner, 2)
	hidden := h.leases.Damage().Hidden
	if len(hidden) < 4 {
		t.Fatalf("leases %d cannot be read: the test tests too little", hidden)
	}
	for _, id := range hidden[:4] {
		request := &pb.GrantLeaseRequest{Id: uint64(id), Ttl: durationpb.New(time.Minute)}
		_, err := c.lease.GrantLease(as(ctx, "mallory"), request)
		wantReason(t, err, codes.AlreadyExists, pb.ErrorReason_ERROR_REASON_LEASE_EXISTS)
		if !h.leases.Unread(id) {
			t.Errorf("lease %d was taken over", id)
		}
		if _, err := c.lease.GrantLease(as(ctx, "alice"), request); err != nil {
			t.Errorf("alice takes over what is hers: %v", err)
		}
	}
	if _, err := c.lease.GrantLease(as(ctx, "mallory"), &pb.GrantLeaseRequest{Id: leases + 1, Ttl: durationpb.New(time.Minute)}); err != nil {
		t.Errorf("another id: %v", err)
	}
}

// TestAPageThatHidesAllLeasesStopsNoGrant of a new one: what is attached to its id cannot be read either.
func TestAPageThatHidesAllLeasesStopsNoGrant(t *testing.T) {
	const owner = "an owner of a lease"
	disk := vfs.NewMem()
	h := mustStartOn(t, disk)
	c, ctx := clientsOf(h.conn), testContext(t)
	if _, err := c.lease.GrantLease(ctx, &pb.GrantLeaseRequest{Id: 1, Ttl: durationpb.New(time.Hour), Owner: owner}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.kv.Put(ctx, &pb.PutRequest{Key: []byte("a/1"), LeaseId: 1}); err != nil {
		t.Fatal(err)
	}
	h, c = h.againWithDamage(t, disk, owner, 1)
	for _, id := range []uint64{0, 1000} {
		if id != 0 && !h.leases.Unread(lease.ID(id)) {
			t.Fatal("the page hides too little: this tests nothing")
		}
		if _, err := c.lease.GrantLease(as(ctx, "alice"), &pb.GrantLeaseRequest{Id: id, Ttl: durationpb.New(time.Minute)}); err != nil {
			t.Errorf("the id %d: %v", id, err)
		}
	}
}

// TestAGrantTakesOverNoKeyOfOthersBesideHiddenOnes: the page that hides the record of a lease hides some of its keys as well.
func TestAGrantTakesOverNoKeyOfOthersBesideHiddenOnes(t *testing.T) {
	const owner, most = "an owner of a lease", 1000
	disk := vfs.NewMem()
	h := mustStartOn(t, disk)
	c, ctx := clientsOf(h.conn), testContext(t)
	if _, err := c.lease.GrantLease(ctx, &pb.GrantLeaseRequest{Id: 1, Ttl: durationpb.New(time.Hour), Owner: owner}); err != nil {
		t.Fatal(err)
	}
	for i := range most {
		if _, err := c.kv.Put(ctx, &pb.PutRequest{Key: fmt.Appendf(nil, "a/%d", i), LeaseId: 1, Durability: pb.Durability_DURABILITY_ASYNC}); err != nil {
			t.Fatal(err)
		}
	}
	h, c = h.againWithDamage(t, disk, owner, 1)
	readable, _, _, err := h.leases.ReadableKeys(ctx, 1, nil, most)
	if _, _, _, hidden := h.leases.Keys(ctx, 1, nil, most); err != nil || hidden == nil || !h.leases.Unread(1) || len(readable) == 0 {
		t.Fatalf("%d of the keys can be read, %v, and all: %v: this tests nothing", len(readable), err, hidden)
	}
	request := &pb.GrantLeaseRequest{Id: 1, Ttl: durationpb.New(time.Minute)}
	_, err = c.lease.GrantLease(as(ctx, "mallory"), request)
	wantReason(t, err, codes.AlreadyExists, pb.ErrorReason_ERROR_REASON_LEASE_EXISTS)
	if _, err := c.lease.GrantLease(as(ctx, "alice"), request); err != nil {
		t.Errorf("alice takes over what is hers: %v", err)
	}
}
