package users

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestReadsWaitForNoChange: a change waits for a device that does not answer. Passwords are checked nevertheless, with which the server's
// metrics are read, and lists are of before.
func TestReadsWaitForNoChange(t *testing.T) {
	files := vfs.NewFaulty(vfs.NewMem())
	h := bootstrapped(t, files)
	held := make(chan struct{})
	rule := files.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Until: held})
	release := sync.OnceFunc(func() { rule.Remove(); close(held) })
	defer release()
	changed := make(chan error, 1)
	go func() { changed <- h.CreateUser(context.Background(), User{Name: "bob"}, "bob's secret") }()
	for rule.Fired() == 0 {
		time.Sleep(time.Millisecond)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if _, err := h.Password(ctx, "ann", "ann's secret"); err != nil {
		t.Errorf("a password: %v", err)
	}
	if all, err := h.Users(ctx); err != nil || len(all) != 1 {
		t.Errorf("%d users, %v", len(all), err)
	}
	release()
	must(t, <-changed)
	if all, err := h.Users(context.Background()); err != nil || len(all) != 2 {
		t.Errorf("%d users after the change, %v", len(all), err)
	}
}
