package vfs

import (
	"io"
	"path"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Faulty wraps a file system and injects faults by rules. Without rules it behaves like that file system.
//
//	faulty := vfs.NewFaulty(fs)
//	rule := faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Nth: 3}) // the third fdatasync of a log fails with EIO
//	...
//	if rule.Fired() == 0 { t.Fatal("the fault was not injected") }
type Faulty struct {
	inner FS
	mu    sync.Mutex
	rules []*Injected
}

var _ FS = (*Faulty)(nil)

// Rule says which operations fail and how. The zero values mean: every operation, of every file, each time, EIO.
type Rule struct {
	// Op is the operations that match; zero means OpAny.
	Op Op
	// Name is a path.Match pattern for the base name; empty means every file. A rename matches with its old name.
	Name string
	// Nth counts matching operations from 1; the rule fires at the Nth only, or from there on if Sticky. With zero it
	// fires each time.
	Nth    int
	Sticky bool
	Fault  Fault
	// Err is the error that the operation reports; nil means EIO.
	Err error
	// Bytes is, for Short, how many bytes are transferred, for FlipBit, the offset of the byte in the buffer
	// (taken modulo its length), and for Unreadable, the offset of a byte in the file.
	Bytes int
	// Delay is how long the operation waits before anything else.
	Delay time.Duration
	// Until, if not nil, blocks the operation until it is closed, like a device that does not answer.
	Until <-chan struct{}
}

// Fault is how an operation fails.
type Fault uint8

// The faults. A fault for reads or writes does not affect other operations.
const (
	// Fail does nothing and reports Err. A failed sync has made nothing durable.
	Fail Fault = iota
	// Short transfers the first Bytes bytes of a read or write and reports Err.
	Short
	// Torn writes only the sectors of a write that have an odd number in the file, and reports Err.
	Torn
	// LostSync reports success and does nothing, like a device that ignores writes or syncs.
	LostSync
	// FlipBit flips the lowest bit of a byte in what a read returns, and reports success.
	FlipBit
	// Unreadable is a page of 4 KiB that the device has lost, the one with the byte at Bytes: a read that reaches it transfers what is
	// before the page and reports Err. Reads of other pages are not affected, and do not count.
	Unreadable
	// Slow only waits for Delay and Until.
	Slow
	// DiscardDirty fails a sync as Linux does after an error of the device: dirty pages count as clean. Reads still
	// return what was written, a later sync reports success without writing it, and a crash loses it; a page that is
	// written again is dirty again. In the same way the sync of a directory loses the changes of its names, until a name changes
	// again. With a file system other than Mem it is Fail.
	DiscardDirty
)

// Injected is a rule in use.
type Injected struct {
	owner   *Faulty
	rule    Rule
	matched int // guarded by owner.mu
	fired   int // guarded by owner.mu
}

// Errnos are errors with which a file system refuses an operation. EINTR is one of them although OS repeats interrupted
// calls: no caller may depend on that.
func Errnos() []syscall.Errno {
	return []syscall.Errno{
		syscall.EIO, syscall.ENOSPC, syscall.EDQUOT, syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.EINTR, syscall.EROFS,
	}
}

// NewFaulty wraps inner.
func NewFaulty(inner FS) *Faulty { return &Faulty{inner: inner} }

// Inject adds a rule. If several rules match an operation, the first injected one fires; all of them count the match.
func (f *Faulty) Inject(rule Rule) *Injected {
	if rule.Op == 0 {
		rule.Op = OpAny
	}
	if rule.Err == nil {
		rule.Err = syscall.EIO
	}
	if _, err := path.Match(rule.Name, ""); err != nil {
		panic("vfs: bad pattern in fault rule: " + rule.Name)
	}
	injected := &Injected{owner: f, rule: rule}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules = append(f.rules, injected)
	return injected
}

// Fired is how often the rule fired.
func (i *Injected) Fired() int {
	i.owner.mu.Lock()
	defer i.owner.mu.Unlock()
	return i.fired
}

// Remove removes the rule.
func (i *Injected) Remove() {
	i.owner.mu.Lock()
	defer i.owner.mu.Unlock()
	i.owner.rules = slices.DeleteFunc(i.owner.rules, func(r *Injected) bool { return r == i })
}

// match counts the operation for every matching rule and returns the rule that fires, after its delay.
func (f *Faulty) match(op Op, name string) *Rule { return f.matchAt(op, name, 0, 0) }

// matchAt is match for an operation on a part of a file.
func (f *Faulty) matchAt(op Op, name string, off int64, length int) *Rule {
	f.mu.Lock()
	var struck *Injected
	for _, injected := range f.rules {
		if !injected.rule.matches(op, name) || !injected.rule.reaches(off, length) {
			continue
		}
		injected.matched++
		if struck == nil && injected.rule.due(injected.matched) {
			struck = injected
			injected.fired++
		}
	}
	f.mu.Unlock()
	if struck == nil {
		return nil
	}
	time.Sleep(struck.rule.Delay)
	if struck.rule.Until != nil {
		<-struck.rule.Until
	}
	return &struck.rule
}

func (r *Rule) matches(op Op, name string) bool {
	if r.Op&op == 0 || !r.Fault.appliesTo(op) {
		return false
	}
	if r.Name == "" {
		return true
	}
	ok, _ := path.Match(r.Name, path.Base(name))
	return ok
}

// reaches reports whether an operation on a part of a file meets the fault.
func (r *Rule) reaches(off int64, length int) bool {
	return r.Fault != Unreadable || off < r.page()+memBlockSize && off+int64(length) > r.page()
}

// page is the offset of the page that is unreadable.
func (r *Rule) page() int64 { return int64(r.Bytes) &^ (memBlockSize - 1) }

func (r *Rule) due(matched int) bool {
	return r.Nth == 0 || matched == r.Nth || r.Sticky && matched > r.Nth
}

func (f Fault) appliesTo(op Op) bool {
	switch f {
	case Short:
		return op&(OpRead|OpWrite) != 0
	case Torn:
		return op == OpWrite
	case LostSync:
		return op&(OpWrite|OpAnySync) != 0
	case FlipBit, Unreadable:
		return op == OpRead
	case DiscardDirty:
		return op&OpAnySync != 0
	}
	return true
}

// do runs an operation that is neither read nor write.
func (f *Faulty) do(op Op, name string, call func() error) error {
	if rule := f.match(op, name); rule != nil {
		switch rule.Fault {
		case DiscardDirty:
			if m, ok := f.inner.(*Mem); ok {
				m.discardNames(name)
			}
			return pathError(op, name, rule.Err)
		case Fail:
			return pathError(op, name, rule.Err)
		case LostSync:
			return nil
		}
	}
	return call()
}

// Open opens or creates a file. The rules apply to its operations too.
func (f *Faulty) Open(name string, mode Mode) (File, error) {
	op := OpOpen
	if mode == Create {
		op = OpCreate
	}
	var file File
	err := f.do(op, name, func() (err error) {
		file, err = f.inner.Open(name, mode)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &faultyFile{File: file, fs: f}, nil
}

// Remove removes a file.
func (f *Faulty) Remove(name string) error {
	return f.do(OpRemove, name, func() error { return f.inner.Remove(name) })
}

// Rename moves a file.
func (f *Faulty) Rename(from, to string) error {
	return f.do(OpRename, from, func() error { return f.inner.Rename(from, to) })
}

// MkdirAll makes directories.
func (f *Faulty) MkdirAll(dir string) error {
	return f.do(OpMkdir, dir, func() error { return f.inner.MkdirAll(dir) })
}

// List lists a directory.
func (f *Faulty) List(dir string) (names []string, err error) {
	err = f.do(OpList, dir, func() (err error) {
		names, err = f.inner.List(dir)
		return err
	})
	return names, err
}

// Size is the named file's length.
func (f *Faulty) Size(name string) (size int64, err error) {
	err = f.do(OpSize, name, func() (err error) {
		size, err = f.inner.Size(name)
		return err
	})
	return size, err
}

// SyncDir makes names durable.
func (f *Faulty) SyncDir(dir string) error {
	return f.do(OpSyncDir, dir, func() error { return f.inner.SyncDir(dir) })
}

// Lock takes a lock file.
func (f *Faulty) Lock(name string) (lock io.Closer, err error) {
	err = f.do(OpLock, name, func() (err error) {
		lock, err = f.inner.Lock(name)
		return err
	})
	return lock, err
}

// Free is the space left.
func (f *Faulty) Free(dir string) (free int64, err error) {
	err = f.do(OpFree, dir, func() (err error) {
		free, err = f.inner.Free(dir)
		return err
	})
	return free, err
}
