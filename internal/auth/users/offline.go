package users

import (
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// ResetOffline makes a user an administrator with a password in the store of a server that does not run: the user is made if it
// does not exist; it gets the role root, and loses its tokens. All other users stay. A nil file system is that of the operating system.
func ResetOffline(ctx context.Context, fs vfs.FS, dir, name, password string) (err error) {
	if fs == nil {
		files := vfs.NewOS()
		defer func() { err = errors.Join(err, files.Close()) }()
		fs = files
	}
	pageSize, err := pageSizeOf(fs, dir)
	if err != nil {
		return err
	}
	store, err := mvcc.OpenContext(ctx, untouched(fs, dir, pageSize))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	m, err := Open(ctx, store, Options{})
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		m.Run(running)
	}()
	defer func() {
		stop()
		<-ended
	}()
	return m.reset(ctx, name, password)
}

// pageSizeOf is the page size of a store; an error if there is none, because opening would make one.
func pageSizeOf(fs vfs.FS, dir string) (int, error) {
	files, lock, err := storage.LockFiles(fs, dir)
	if err != nil {
		return 0, err
	}
	if err := lock.Close(); err != nil {
		return 0, err
	}
	state, err := files.OpenState()
	if err != nil {
		return 0, err
	}
	defer func() { _ = state.Close() }() // nothing was written
	return state.Pages.PageSize(), nil
}

// untouched opens a store so that it keeps everything which the options of its server may keep: the past, and the log.
func untouched(fs vfs.FS, dir string, pageSize int) mvcc.Options {
	const forever = math.MaxInt64
	return mvcc.Options{
		Storage: storage.Options{
			Dir: dir, FS: fs, PageSize: pageSize, MemoryBytes: 256 << 20,
			ChangeLog: storage.ChangeLog{Age: forever, Bytes: forever},
		},
		CheckpointInterval: 24 * time.Hour, Retention: forever, RetentionBytes: forever, RequestWindow: 365 * 24 * time.Hour, RequestBytes: forever,
	}
}

func (m *Manager) reset(ctx context.Context, name, password string) error {
	hash, err := m.newHash(ctx, password)
	if err != nil {
		return err
	}
	return m.change(ctx, func(d *draft) error {
		before := d.next.users[name]
		if before == nil {
			return d.createUser(name, User{Roles: []string{RoleRoot}, hash: hash})
		}
		u := *before
		u.Disabled, u.hash, u.Roles = false, hash, append(slices.Clone(u.Roles), RoleRoot)
		d.removeTokens(name, func(*token) bool { return true })
		return d.setUser(&u)
	})
}
