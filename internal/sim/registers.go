package sim

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// RegisterKind is what an operation does to the value of its key.
type RegisterKind uint8

// Kinds of operations.
const (
	Get           RegisterKind = iota
	Put                        // Value
	Delete                     //
	CompareAndSet              // Value, if the key has the value Expect
	Increment                  // by one; a missing key counts as 0
)

// valueStep is what the values of puts and compare-and-sets are multiples of, each of its own, so that increments do not
// make one of another.
const valueStep = 1000

// RegisterValue is the nth value to put.
func RegisterValue(n int64) string { return strconv.FormatInt(n*valueStep, 10) }

// RegisterOp is one operation on one key, and what its client was told.
type RegisterOp struct {
	Client        int
	Key           string
	Kind          RegisterKind
	Expect, Value string

	// The answer. Epoch is that of a write, or of the value that a Get found; 0: the answer had none.
	Applied bool // CompareAndSet
	Seen    bool // Found and Old are the state before the operation
	Found   bool
	Old     string
	Epoch   uint64

	// Operations with the same Stream, unless it is 0, take effect in the order of Sequence. ReadEpoch is at which epoch
	// a Get of a stream read.
	Stream, Sequence int
	ReadEpoch        uint64

	// Return of an unknown operation is when it can no longer take effect.
	Status       Status
	Call, Return time.Duration
}

func (o *RegisterOp) String() string {
	what := [...]string{"get", "put", "delete", "compare-and-set", "increment"}[o.Kind]
	return fmt.Sprintf("client %d, stream %d.%d, %v, [%v, %v]: %s %s %q %q, applied %t, saw %t %t %q, epoch %d, read epoch %d",
		o.Client, o.Stream, o.Sequence, o.Status, o.Call, o.Return, what, o.Key, o.Expect, o.Value, o.Applied, o.Seen, o.Found, o.Old, o.Epoch, o.ReadEpoch)
}

// CheckRegisters asks porcupine, for each key by itself, whether there is one order of its operations that explains all
// answers, in which each takes effect between its call and its return, those of a stream in their sequence, and writes
// in the order of their epochs. Each put and each
// compare-and-set has a RegisterValue of its own.
func CheckRegisters(ops []*RegisterOp, timeout time.Duration) error {
	keys := map[string][]*RegisterOp{}
	for _, o := range ops {
		if o.Status == Committed || o.Status == Unknown && o.Kind != Get {
			keys[o.Key] = append(keys[o.Key], o)
		}
	}
	for key, ops := range keys {
		if err := checkRegister(withoutDoubt(ops), timeout); err != nil {
			return fmt.Errorf("key %q: %w", key, err)
		}
	}
	return checkStreams(ops)
}

// withoutDoubt decides for most unknown writes whether they took effect, because the checker takes time that is
// exponential in their number. A value that was seen was written, before the end of the request that saw it. One that
// was not seen can explain only compare-and-sets that failed and did not see why, so these go with it.
func withoutDoubt(ops []*RegisterOp) []*RegisterOp {
	ops = slices.Clone(ops)
	for decided := true; decided; { // a compare-and-set that took effect has seen a value itself
		decided = false
		seen := firstSeen(ops)
		for i, o := range ops {
			if first := seen[o.Value]; first != nil && o.inDoubt() {
				happened := *o
				happened.Status, happened.Applied, happened.Return = Committed, true, min(o.Return, first.Return)
				ops[i], decided = &happened, true
			}
		}
	}
	unseen := slices.ContainsFunc(ops, (*RegisterOp).inDoubt)
	return slices.DeleteFunc(ops, func(o *RegisterOp) bool {
		blind := o.Kind == CompareAndSet && o.Status == Committed && !o.Seen && !o.Applied
		return o.inDoubt() || unseen && blind
	})
}

// inDoubt reports whether an operation writes a value of its own and may or may not have taken effect.
func (o *RegisterOp) inDoubt() bool {
	return o.Status == Unknown && (o.Kind == Put || o.Kind == CompareAndSet)
}

// firstSeen returns for each value which operation that saw it ended first.
func firstSeen(ops []*RegisterOp) map[string]*RegisterOp {
	seen := map[string]*RegisterOp{}
	for _, o := range ops {
		for _, value := range o.sawValues() {
			if first := seen[value]; first == nil || o.Return < first.Return {
				seen[value] = o
			}
		}
	}
	return seen
}

// sawValues are the values that an operation saw before it. Increments that may have been executed in between make n of
// n-1, n-2 and so on, down to what was put.
func (o *RegisterOp) sawValues() (values []string) {
	if o.Status != Committed {
		return nil
	}
	if o.Applied && o.Kind == CompareAndSet {
		values = append(values, put(o.Expect))
	}
	if o.Seen && o.Found {
		values = append(values, put(o.Old))
	}
	return values
}

func put(value string) string {
	n, _ := strconv.Atoi(value)
	return strconv.Itoa(n - n%valueStep)
}

func checkRegister(ops []*RegisterOp, timeout time.Duration) error {
	slices.SortFunc(ops, func(a, b *RegisterOp) int { return int(a.Call - b.Call) })
	streams := map[int]int{0: 0}
	var operations []porcupine.Operation
	for _, o := range ops {
		if _, ok := streams[o.Stream]; !ok {
			streams[o.Stream] = len(streams)
		}
		operations = append(operations, porcupine.Operation{ClientId: o.Client, Input: o, Call: int64(o.Call), Return: int64(o.Return)})
	}
	model := porcupine.NondeterministicModel{
		Init: func() []any { return []any{register{sequences: strings.Repeat("\x00", 2*len(streams))}} },
		Step: func(state, input, _ any) []any {
			o := input.(*RegisterOp)
			return state.(register).step(o, streams[o.Stream])
		},
	}
	switch porcupine.CheckOperationsTimeout(model.ToModel(), operations, timeout) {
	case porcupine.Illegal:
		var b strings.Builder
		for _, o := range ops {
			fmt.Fprintf(&b, "\n  %v", o)
		}
		return fmt.Errorf("no order explains this history:%s", b.String())
	case porcupine.Unknown:
		return fmt.Errorf("porcupine found no answer about %d operations in %v", len(ops), timeout)
	}
	return nil
}

// register is the state of a key. It is comparable, as porcupine wants it.
type register struct {
	found     bool
	value     string
	epoch     uint64 // at least that of the last write
	sequences string // of each stream the last operation that took effect, in two bytes
}

// step returns the states that can follow. An unknown operation may also never take effect.
func (r register) step(o *RegisterOp, stream int) []any {
	after, ok := r.apply(o)
	if ok && stream != 0 {
		after.sequences, ok = inSequence(r.sequences, stream, o.Sequence)
	}
	switch {
	case o.Status == Unknown && ok:
		return []any{r, after}
	case o.Status == Unknown:
		return []any{r}
	case ok:
		return []any{after}
	}
	return nil
}

func (r register) apply(o *RegisterOp) (after register, ok bool) {
	if o.Seen && (o.Found != r.found || o.Old != r.value) {
		return r, false
	}
	after = r
	switch o.Kind {
	case Get:
		after.epoch = max(r.epoch, o.Epoch)
		return after, !o.Found || o.Epoch >= r.epoch
	case Put:
		after.found, after.value = true, o.Value
	case Delete:
		after.found, after.value = false, ""
	case CompareAndSet:
		holds := r.found && r.value == o.Expect
		if o.Status == Committed && holds != o.Applied {
			return r, false
		}
		if !holds {
			return r, true
		}
		after.value = o.Value
	case Increment:
		n, _ := strconv.ParseInt(r.value, 10, 64) // a missing key counts as 0
		after.found, after.value = true, strconv.FormatInt(n+1, 10)
	}
	if o.Epoch != 0 {
		after.epoch = o.Epoch
	}
	return after, o.Epoch == 0 || o.Epoch > r.epoch
}

// inSequence notes that the operation took effect, unless a later one of its stream has done so before.
func inSequence(sequences string, stream, sequence int) (string, bool) {
	b := []byte(sequences)
	last := int(b[2*stream])<<8 | int(b[2*stream+1])
	b[2*stream], b[2*stream+1] = byte(sequence>>8), byte(sequence)
	return string(b), sequence > last
}

// checkStreams checks across all keys that the epochs of each stream follow its sequence: a write has a larger epoch than
// all before it, and a read is of an epoch at least as large.
func checkStreams(ops []*RegisterOp) error {
	streams := map[int][]*RegisterOp{}
	for _, o := range ops {
		if o.Stream != 0 && o.Status == Committed {
			streams[o.Stream] = append(streams[o.Stream], o)
		}
	}
	for _, ops := range streams {
		slices.SortFunc(ops, func(a, b *RegisterOp) int { return a.Sequence - b.Sequence })
		var last *RegisterOp
		at := uint64(0)
		for _, o := range ops {
			epoch := o.ReadEpoch
			if o.Kind != Get {
				epoch = o.Epoch
			}
			if epoch == 0 {
				continue // nothing was written
			}
			if epoch < at || o.Kind != Get && epoch == at {
				return fmt.Errorf("a stream out of order:\n  %v\n  %v", last, o)
			}
			last, at = o, epoch
		}
	}
	return nil
}
