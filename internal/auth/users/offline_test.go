package users

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestALockOutIsUndoneOffline: for a user that exists and for one that does not; other users and tokens stay.
func TestALockOutIsUndoneOffline(t *testing.T) {
	before := hashDefault
	hashDefault = cheap
	t.Cleanup(func() { hashDefault = before })
	ctx, fs := context.Background(), vfs.NewMem()
	if err := ResetOffline(ctx, fs, "db", "ann", "new secret"); !errors.Is(err, storage.ErrNoStore) && err == nil {
		t.Errorf("without a store: %v", err)
	}
	h := bootstrapped(t, fs)
	must(t, h.CreateUser(ctx, User{Name: "bob"}, "bob's secret"))
	ann, old := h.login("ann", "ann's secret")
	_, other := h.login("bob", "bob's secret")
	must(t, h.Enable(ctx, &ann))
	if err := ResetOffline(ctx, fs, "db", "ann", "new secret"); err == nil {
		t.Error("the store is open, and was changed")
	}
	h.stop()

	must(t, ResetOffline(ctx, fs, "db", "bob", "new secret"))
	must(t, ResetOffline(ctx, fs, "db", "eve", "new secret"))
	h = mustOpen(t, fs)
	if !h.Table().Enabled || len(h.Table().Users) != 3 {
		t.Errorf("%+v", h.Table())
	}
	if _, err := h.Bearer("Bearer " + old); err != nil {
		t.Errorf("a token of another user: %v", err)
	}
	if _, err := h.Bearer("Bearer " + other); !errors.Is(err, auth.ErrUnauthenticated) {
		t.Errorf("a token of before: %v", err)
	}
	for _, name := range []string{"bob", "eve"} {
		if id, _ := h.login(name, "new secret"); h.may(id, "any") != nil {
			t.Errorf("%s has no rights", name)
		}
	}
}

// TestAnOfflineResetLeavesNoFilesOfRoot: the server of another account opens the store afterwards.
func TestAnOfflineResetLeavesNoFilesOfRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root creates files for others")
	}
	before := hashDefault
	hashDefault = cheap
	t.Cleanup(func() { hashDefault = before })
	const account = 61234
	dir := filepath.Join(t.TempDir(), "db")
	fs := vfs.NewOS()
	store, err := mvcc.Open(mvcc.Options{Storage: storage.Options{
		Dir: dir, FS: fs, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 256 << 10, SegmentBytes: 256 << 10,
	}})
	must(t, err)
	must(t, errors.Join(store.Close(), fs.Close()))
	files := func(visit func(name string)) {
		t.Helper()
		must(t, filepath.WalkDir(dir, func(name string, _ os.DirEntry, err error) error {
			visit(name)
			return err
		}))
	}
	files(func(name string) { must(t, os.Chown(name, account, account)) })
	must(t, ResetOffline(t.Context(), nil, dir, "ann", "new secret"))
	files(func(name string) {
		info, err := os.Stat(name)
		must(t, err)
		if uid := info.Sys().(*syscall.Stat_t).Uid; uid != account {
			t.Errorf("%s belongs to %d", name, uid)
		}
	})
}
