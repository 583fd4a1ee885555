package vfs

import (
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"sync"
)

// Mem is a file system in memory that can crash: Crash returns what a disk could hold after a power failure, which is
// everything that file and directory syncs promised, and an arbitrary part of the rest.
//
// Every file has two images: the visible one, which readers see, and the durable one. The difference is the list of
// writes and size changes since the last sync. Names have two tables and a list in the same way. A sync applies the list
// to the durable image; a crash applies a part of it.
//
// A directory is durable as soon as it exists (as MkdirAll promises), and the sync of a file does not make its name
// durable.
type Mem struct {
	// mu guards everything below, also the files' contents: with one lock a crash is atomic.
	mu       sync.RWMutex
	crashed  bool
	dirs     map[string]bool
	names    map[string]*memNode // what programs see
	durable  map[string]*memNode // what a crash keeps in any case
	pending  []nameChange        // from durable to names, oldest first
	locks    map[string]bool
	capacity int64 // bytes of blocks that may be used; 0 is no limit
	used     int64 // bytes of blocks of files that have a name or a handle
	ops      int64 // mutating operations so far
	crashAt  int64 // the mutating operation instead of which the system crashes; 0 is never
	hook     func(op Op, name string)
}

var _ FS = (*Mem)(nil)

// memNode is a file apart from its names.
type memNode struct {
	now     *memImage
	durable *memImage
	pending []contentChange // from durable to now, oldest first
	// discarded are blocks of now whose last writes a failed sync discarded: no sync writes them until they are written
	// again.
	discarded map[int]bool
	links     int
	handles   int
}

// nameChange is a change of the name table since its directories were synced. A creation has only to, a removal only from.
type nameChange struct {
	from, to string
	node     *memNode // what to names afterwards
	// discarded means that a failed sync of the directory discarded the change: no sync writes it until one of its names changes again.
	discarded bool
}

// contentChange is a write, or a change of size, since the last sync of its file.
type contentChange struct {
	kind Op // OpWrite, OpTruncate, OpPreallocate
	off  int64
	data []byte
	size int64
}

// NewMem is an empty file system without a limit.
func NewMem() *Mem {
	return &Mem{
		dirs:    map[string]bool{".": true, "/": true},
		names:   map[string]*memNode{},
		durable: map[string]*memNode{},
		locks:   map[string]bool{},
	}
}

// SetCapacity limits the file system to that many bytes, counted in blocks of 4 KiB; 0 is no limit.
func (m *Mem) SetCapacity(bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.capacity = bytes
}

// LeaveFree lets others take all but so many bytes: it limits the file system to what it has and these.
func (m *Mem) LeaveFree(bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.capacity = max(m.used+bytes, 1)
}

// SetHook calls hook before each mutating operation (OpMutating), outside the lock and on the caller's goroutine. The
// hook may crash the file system.
func (m *Mem) SetHook(hook func(op Op, name string)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hook = hook
}

// Mutations counts the mutating operations (OpMutating) so far. A test runs a workload once to learn at how many
// operations it can crash; see CrashAt.
func (m *Mem) Mutations() int64 {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.ops
}

// CrashAt crashes the file system when Mutations would become n: that operation and everything after it returns
// ErrCrashed.
func (m *Mem) CrashAt(n int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.crashAt = n
}

// Crashed reports whether the file system has crashed.
func (m *Mem) Crashed() bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.crashed
}

// mutate runs one mutating operation: the hook, the count, the requested crash, then do under the lock.
func (m *Mem) mutate(op Op, name string, do func() error) error {
	m.mu.RLock()
	hook := m.hook
	m.mu.RUnlock()
	if hook != nil {
		hook(op, name)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.crashed {
		m.ops++
		m.crashed = m.ops == m.crashAt
	}
	if m.crashed {
		return pathError(op, name, ErrCrashed)
	}
	return pathError(op, name, do())
}

// observe runs an operation that changes nothing.
func (m *Mem) observe(op Op, name string, do func() error) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.crashed {
		return pathError(op, name, ErrCrashed)
	}
	return pathError(op, name, do())
}

// Open opens or creates a file.
func (m *Mem) Open(name string, mode Mode) (File, error) {
	name = path.Clean(name)
	if mode == Create {
		return m.create(name)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.crashed {
		return nil, pathError(OpOpen, name, ErrCrashed)
	}
	node := m.names[name]
	if node == nil {
		return nil, pathError(OpOpen, name, fs.ErrNotExist)
	}
	node.handles++
	return &memFile{fs: m, node: node, name: name, readOnly: mode == ReadOnly}, nil
}

func (m *Mem) create(name string) (File, error) {
	var file *memFile
	err := m.mutate(OpCreate, name, func() error {
		node, err := m.createLocked(name)
		if err != nil {
			return err
		}
		node.handles++
		file = &memFile{fs: m, node: node, name: name}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return file, nil
}

func (m *Mem) createLocked(name string) (*memNode, error) {
	if m.names[name] != nil || m.dirs[name] {
		return nil, fs.ErrExist
	}
	if !m.dirs[path.Dir(name)] {
		return nil, fs.ErrNotExist
	}
	node := &memNode{now: &memImage{}, durable: &memImage{}}
	m.changeName(nameChange{to: name, node: node})
	return node, nil
}

// changeName applies a change to the visible names, and records it for the crash.
func (m *Mem) changeName(change nameChange) {
	replaced := m.names[change.to]
	gone := m.names[change.from]
	if change.to != "" {
		change.node.links++
	}
	applyName(m.names, change)
	m.recordDirtyLocked(change)
	m.pending = append(m.pending, change)
	m.unlinkLocked(replaced)
	m.unlinkLocked(gone)
}

// recordDirtyLocked takes back that earlier changes of a change's names were discarded.
func (m *Mem) recordDirtyLocked(change nameChange) {
	names := change.touched()
	for i := len(m.pending) - 1; i >= 0; i-- {
		earlier := &m.pending[i]
		if slices.ContainsFunc(earlier.touched(), func(name string) bool { return slices.Contains(names, name) }) {
			earlier.discarded = false
			names = append(names, earlier.touched()...)
		}
	}
}

// discardNames is a sync of a directory that fails after the kernel has discarded its dirty pages: see DiscardDirty.
func (m *Mem) discardNames(dir string) {
	dir = path.Clean(dir)
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.pending {
		for _, name := range m.pending[i].touched() {
			m.pending[i].discarded = m.pending[i].discarded || path.Dir(name) == dir
		}
	}
}

func applyName(names map[string]*memNode, change nameChange) {
	delete(names, change.from)
	if change.to != "" {
		names[change.to] = change.node
	}
}

// unlinkLocked removes one name of a node and frees its space if it has no other name and no handle.
func (m *Mem) unlinkLocked(node *memNode) {
	if node == nil {
		return
	}
	node.links--
	m.releaseLocked(node)
}

func (m *Mem) releaseLocked(node *memNode) {
	if node.links == 0 && node.handles == 0 {
		m.used -= int64(node.now.used) * memBlockSize
	}
}

// Remove removes a file or an empty directory.
func (m *Mem) Remove(name string) error {
	name = path.Clean(name)
	return m.mutate(OpRemove, name, func() error {
		if m.dirs[name] {
			return m.removeDirLocked(name)
		}
		if m.names[name] == nil {
			return fs.ErrNotExist
		}
		m.changeName(nameChange{from: name})
		return nil
	})
}

func (m *Mem) removeDirLocked(dir string) error {
	for name := range m.names {
		if path.Dir(name) == dir {
			return fmt.Errorf("directory not empty: %w", fs.ErrInvalid)
		}
	}
	delete(m.dirs, dir)
	return nil
}

// Rename moves a file and replaces a file with the new name. It is atomic in a crash, as on every journaling file
// system: the file has one of its names.
func (m *Mem) Rename(from, to string) error {
	from, to = path.Clean(from), path.Clean(to)
	return m.mutate(OpRename, from+" -> "+to, func() error {
		node := m.names[from]
		if node == nil || !m.dirs[path.Dir(to)] {
			return fs.ErrNotExist
		}
		if m.dirs[to] {
			return fs.ErrExist
		}
		if from != to {
			m.changeName(nameChange{from: from, to: to, node: node})
		}
		return nil
	})
}

// MkdirAll makes dir and its missing parents.
func (m *Mem) MkdirAll(dir string) error {
	dir = path.Clean(dir)
	return m.mutate(OpMkdir, dir, func() error {
		for d := dir; !m.dirs[d]; d = path.Dir(d) {
			if m.names[d] != nil {
				return fs.ErrExist
			}
			m.dirs[d] = true
		}
		return nil
	})
}

// List returns the names in dir, sorted.
func (m *Mem) List(dir string) ([]string, error) {
	dir = path.Clean(dir)
	found := []string{}
	err := m.observe(OpList, dir, func() error {
		if !m.dirs[dir] {
			return fs.ErrNotExist
		}
		for name := range m.names {
			if path.Dir(name) == dir {
				found = append(found, path.Base(name))
			}
		}
		for name := range m.dirs {
			if path.Dir(name) == dir && name != dir && !strings.HasSuffix(name, "/") {
				found = append(found, path.Base(name))
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.Sort(found)
	return found, nil
}

// Size is the named file's length.
func (m *Mem) Size(name string) (size int64, err error) {
	name = path.Clean(name)
	err = m.observe(OpSize, name, func() error {
		node := m.names[name]
		if node == nil {
			return fs.ErrNotExist
		}
		size = node.now.size
		return nil
	})
	return size, err
}

// SyncDir makes the names in dir durable.
func (m *Mem) SyncDir(dir string) error {
	dir = path.Clean(dir)
	return m.mutate(OpSyncDir, dir, func() error {
		if !m.dirs[dir] {
			return fs.ErrNotExist
		}
		m.syncNamesLocked(dir)
		return nil
	})
}

// syncNamesLocked makes the pending changes in dir durable, and with each change the earlier changes of its names.
func (m *Mem) syncNamesLocked(dir string) {
	chosen := make([]bool, len(m.pending))
	needed := map[string]bool{}
	for i := len(m.pending) - 1; i >= 0; i-- {
		for _, name := range m.pending[i].touched() {
			chosen[i] = chosen[i] || path.Dir(name) == dir && !m.pending[i].discarded || needed[name]
		}
		if chosen[i] {
			for _, name := range m.pending[i].touched() {
				needed[name] = true
			}
		}
	}
	var rest []nameChange
	for i, change := range m.pending {
		if chosen[i] {
			applyName(m.durable, change)
		} else {
			rest = append(rest, change)
		}
	}
	m.pending = rest
}

// touched is the names that the change depends on.
func (c nameChange) touched() []string {
	switch {
	case c.from == "":
		return []string{c.to}
	case c.to == "":
		return []string{c.from}
	}
	return []string{c.from, c.to}
}

// Lock takes the lock file. A crash ends all locks.
func (m *Mem) Lock(name string) (io.Closer, error) {
	name = path.Clean(name)
	m.mu.RLock()
	exists := m.names[name] != nil
	m.mu.RUnlock()
	if !exists {
		file, err := m.create(name)
		if err == nil {
			err = file.Close()
		}
		if err != nil {
			return nil, err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.crashed {
		return nil, pathError(OpLock, name, ErrCrashed)
	}
	if m.locks[name] {
		return nil, pathError(OpLock, name, ErrLocked)
	}
	m.locks[name] = true
	return &memLock{fs: m, name: name}, nil
}

type memLock struct {
	fs   *Mem
	name string
}

// Close releases the lock.
func (l *memLock) Close() error {
	l.fs.mu.Lock()
	defer l.fs.mu.Unlock()
	if l.fs.crashed {
		return pathError(OpClose, l.name, ErrCrashed)
	}
	if !l.fs.locks[l.name] {
		return pathError(OpClose, l.name, fs.ErrClosed)
	}
	delete(l.fs.locks, l.name)
	return nil
}

// memUnlimited is the result of Free without a limit.
const memUnlimited = 1 << 40

// Free is the rest of the capacity.
func (m *Mem) Free(dir string) (free int64, err error) {
	dir = path.Clean(dir)
	err = m.observe(OpFree, dir, func() error {
		if !m.dirs[dir] {
			return fs.ErrNotExist
		}
		free = memUnlimited
		if m.capacity > 0 {
			free = max(0, m.capacity-m.used)
		}
		return nil
	})
	return free, err
}
