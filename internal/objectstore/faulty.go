package objectstore

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"
)

// Faulty wraps a store and injects faults by rules. Without rules it behaves like that store. A test injects faults below
// WithRetries to see that they are overcome, and above to see that they are reported.
type Faulty struct {
	Store
	mu    sync.Mutex
	rules []*Fault
	calls map[Operation]int
}

// Operation is a method of a store.
type Operation string

// The operations.
const (
	OpCreate Operation = "create"
	OpRead   Operation = "read"
	OpList   Operation = "list"
	OpDelete Operation = "delete"
)

// Fault is a rule: which calls fail, and how. Its zero value fails every operation for good.
type Fault struct {
	Op     Operation // empty for all
	Prefix string    // of the names
	Nth    int       // the Nth matching call fails, from 1; zero for all of them
	Sticky bool      // and all calls after it
	Kind   FaultKind
	Bytes  int64           // of ReadShort and the kinds after it, up to ReadFlipped: after as many
	Until  <-chan struct{} // Slow: how long the call waits; also ends with the context

	matched, fired int // guarded by the owner's mutex
}

// FaultKind is how a call fails.
type FaultKind uint8

// The faults.
const (
	FailForGood     FaultKind = iota // an error that is not tried again
	FailForNow                       // an error that is tried again
	FailAfter                        // the call succeeds, and the answer is lost
	FailExists                       // a creation says that the object exists; it does nothing
	CreateTwice                      // something before the target repeats a creation: the object exists, and the second answer says so
	CreatePartial                    // a creation succeeds and stores half of the bytes
	CreateNothing                    // a creation succeeds and stores nothing
	ReadShort                        // the connection breaks after Bytes bytes
	ReadStalls                       // nothing comes after Bytes bytes, until the context ends
	ReadUnreadable                   // the device cannot read the byte at Bytes
	ReadFlipped                      // the byte at Bytes has another bit
	ListLate                         // a list does not have the matching objects
	InodeUnreadable                  // the device cannot read what the file system notes about an object: a list has its name alone
	Slow                             // the call waits
)

// NewFaulty wraps a store.
func NewFaulty(inner Store) *Faulty { return &Faulty{Store: inner, calls: map[Operation]int{}} }

// Inject adds a rule. The first rule that fires decides.
func (f *Faulty) Inject(rule Fault) *Fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules = append(f.rules, &rule)
	return &rule
}

// Heal removes all rules.
func (f *Faulty) Heal() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules = nil
}

// Fired is how often a rule fired.
func (f *Faulty) Fired(rule *Fault) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return rule.fired
}

// Calls is the number of calls of an operation, also of those that failed.
func (f *Faulty) Calls(op Operation) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[op]
}

// find returns the rule that fires for a call, or nil.
func (f *Faulty) find(op Operation, name string) *Fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls[op]++
	var found *Fault
	for _, r := range f.rules {
		if r.Op != "" && r.Op != op || !strings.HasPrefix(name, r.Prefix) || r.Kind == ListLate || r.Kind == InodeUnreadable && op == OpList {
			continue
		}
		r.matched++
		if found == nil && (r.Nth == 0 || r.matched == r.Nth || r.Sticky && r.matched > r.Nth) {
			r.fired++
			found = r
		}
	}
	return found
}

// before is the fault of a call that happens instead of it.
func (r *Fault) before(ctx context.Context, op Operation, name string) error {
	switch r.Kind {
	case FailForGood:
		return fmt.Errorf("%s %s: injected fault", op, name)
	case FailForNow:
		return fmt.Errorf("%s %s: injected fault: %w", op, name, errTemporary)
	case InodeUnreadable:
		return fmt.Errorf("%s %s: injected fault: %w", op, name, ErrUnreadable)
	case FailExists:
		return fmt.Errorf("%s %s: injected fault: %w", op, name, ErrExists)
	case Slow:
		select {
		case <-r.Until:
		case <-ctx.Done():
			return fmt.Errorf("%s %s: %w", op, name, ctx.Err())
		}
	default:
	}
	return nil
}

// Create creates an object, unless a rule fires.
func (f *Faulty) Create(ctx context.Context, name string, content Content) error {
	r := f.find(OpCreate, name)
	if r == nil {
		return f.Store.Create(ctx, name, content)
	}
	if err := r.before(ctx, OpCreate, name); err != nil {
		return err
	}
	switch r.Kind {
	case CreateNothing:
		return nil
	case CreateTwice:
		if err := f.Store.Create(ctx, name, content); err != nil {
			return err
		}
		return f.Store.Create(ctx, name, content)
	case CreatePartial:
		whole, err := readContent(content)
		if err != nil {
			return err
		}
		return f.Store.Create(ctx, name, Bytes(whole[:len(whole)/2]))
	case FailAfter:
		if err := f.Store.Create(ctx, name, content); err != nil {
			return err
		}
		return fmt.Errorf("create %s: injected fault: the answer is lost: %w", name, errTemporary)
	default:
		return f.Store.Create(ctx, name, content)
	}
}

func readContent(content Content) ([]byte, error) {
	r, err := content.Open()
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }() // it was only read
	return io.ReadAll(r)
}

// Read reads an object, unless a rule fires.
func (f *Faulty) Read(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	r := f.find(OpRead, name)
	if r == nil {
		return f.Store.Read(ctx, name, offset, length)
	}
	if err := r.before(ctx, OpRead, name); err != nil {
		return nil, err
	}
	body, err := f.Store.Read(ctx, name, offset, length)
	if err != nil || r.Kind < ReadShort || r.Kind > ReadFlipped {
		return body, err
	}
	return &faultyReader{body, ctx, r, offset}, nil
}

// faultyReader is a reader of an object with a fault at a byte of the object.
type faultyReader struct {
	io.ReadCloser
	ctx   context.Context // of the read
	fault *Fault
	at    int64
}

func (r *faultyReader) Read(p []byte) (int, error) {
	if r.fault.Kind != ReadFlipped {
		if r.at >= r.fault.Bytes {
			return 0, r.broken()
		}
		p = p[:min(int64(len(p)), r.fault.Bytes-r.at)]
	}
	n, err := r.ReadCloser.Read(p)
	if at := r.fault.Bytes - r.at; r.fault.Kind == ReadFlipped && at >= 0 && at < int64(n) {
		p[at] ^= 1
	}
	r.at += int64(n)
	return n, err
}

// broken is the end of a connection that fails.
func (r *faultyReader) broken() error {
	switch r.fault.Kind {
	case ReadShort:
		return fmt.Errorf("injected fault: %w", io.ErrUnexpectedEOF)
	case ReadUnreadable:
		return fmt.Errorf("injected fault: %w: %w", ErrUnreadable, errTemporary)
	default:
	}
	<-r.ctx.Done()
	return r.ctx.Err()
}

// List lists, unless a rule fires.
func (f *Faulty) List(ctx context.Context, prefix string, each func(Object) error) error {
	r := f.find(OpList, prefix)
	if r == nil {
		return f.Store.List(ctx, prefix, f.listed(each))
	}
	if err := r.before(ctx, OpList, prefix); err != nil {
		return err
	}
	return f.Store.List(ctx, prefix, f.listed(each))
}

// listed leaves out the objects that are listed late, and what a list does not tell of others.
func (f *Faulty) listed(each func(Object) error) func(Object) error {
	f.mu.Lock()
	rules := slices.Clone(f.rules)
	f.mu.Unlock()
	return func(o Object) error {
		has := func(kind FaultKind) bool {
			return slices.ContainsFunc(rules, func(r *Fault) bool { return r.Kind == kind && strings.HasPrefix(o.Name, r.Prefix) })
		}
		if has(ListLate) {
			return nil
		}
		if has(InodeUnreadable) {
			o = Object{Name: o.Name}
		}
		return each(o)
	}
}

// Delete deletes, unless a rule fires.
func (f *Faulty) Delete(ctx context.Context, name string) error {
	r := f.find(OpDelete, name)
	if r == nil {
		return f.Store.Delete(ctx, name)
	}
	if err := r.before(ctx, OpDelete, name); err != nil {
		return err
	}
	if err := f.Store.Delete(ctx, name); err != nil {
		return err
	}
	if r.Kind == FailAfter {
		return fmt.Errorf("delete %s: injected fault: the answer is lost: %w", name, errTemporary)
	}
	return nil
}

// QuickRetry is a policy for tests: its pauses are short.
var QuickRetry = Retry{FirstPause: time.Microsecond, MaxPause: time.Millisecond}
