package mvcc

import (
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strconv"

	"github.com/epochkv/epochkv/internal/keys"
)

// modelVersion is what one commit has left of a key.
type modelVersion struct {
	epoch    keys.Epoch
	found    bool
	value    string
	deadline uint64
}

// modelChange is what a commit does to a key.
type modelChange struct {
	modelVersion
	computed bool // from the version before, whose queue entry it removes even if it has no deadline itself
}

// modelRequest is what is known of a request with an id.
type modelRequest struct {
	sent   Request
	state  OutcomeState
	epoch  keys.Epoch
	result string
}

type modelCommit struct {
	epoch   keys.Epoch
	changes map[string]modelChange
	request *modelRequest
}

// modelState is what all commits have left: every version of every key, the expiry queue as queue shows it, and the requests.
type modelState struct {
	visible  keys.Epoch
	versions map[string][]modelVersion // with ascending epochs
	queue    map[string]bool
	requests map[RequestID]*modelRequest
	log      []modelCommit
}

// truncate makes the state the one of an epoch.
func (m *modelState) truncate(through keys.Epoch) {
	log := m.log
	*m = modelState{versions: map[string][]modelVersion{}, queue: map[string]bool{}, requests: map[RequestID]*modelRequest{}}
	for _, c := range log {
		if c.epoch <= through {
			m.apply(c)
		}
	}
}

func (m *modelState) apply(c modelCommit) {
	m.visible, m.log = c.epoch, append(m.log, c)
	for key, change := range c.changes {
		before := m.newest(key).deadline
		if change.deadline != before && (change.computed || change.deadline != 0) {
			delete(m.queue, fmt.Sprint(before, key))
			if change.deadline != 0 {
				m.queue[fmt.Sprint(change.deadline, key)] = true
			}
		}
		change.epoch = c.epoch
		m.versions[key] = append(m.versions[key], change.modelVersion)
	}
	if c.request != nil {
		m.requests[c.request.sent.ID] = c.request
	}
}

// version is the newest version of a key up to an epoch.
func (m *modelState) version(key string, at keys.Epoch) (v modelVersion) {
	all := m.versions[key]
	for i := len(all) - 1; i >= 0; i-- {
		if all[i].epoch <= at {
			return all[i]
		}
	}
	return v
}

func (m *modelState) newest(key string) modelVersion { return m.version(key, keys.MaxEpoch) }

// within are the keys that have a version in [lower, upper), in order. An empty upper is no bound.
func (m *modelState) within(lower, upper string) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(m.versions)), func(k string) bool { return k < lower || upper != "" && k >= upper })
}

// found are the keys in [lower, upper) that have a value at an epoch, in order.
func (m *modelState) found(lower, upper string, at keys.Epoch) []string {
	return slices.DeleteFunc(m.within(lower, upper), func(k string) bool { return !m.version(k, at).found })
}

// changed reports whether a key in [lower, upper) was written or deleted after an epoch, up to another one.
func (m *modelState) changed(lower, upper string, after, through keys.Epoch) bool {
	return slices.ContainsFunc(m.within(lower, upper), func(k string) bool { return m.version(k, through).epoch > after })
}

func (m *modelState) holds(c *Condition) bool {
	v := m.newest(string(c.Key))
	switch c.Kind {
	case KeyAbsent:
		return !v.found
	case KeyPresent:
		return v.found
	case ValueEquals:
		return v.found && v.value == string(c.Value)
	case EpochEquals:
		return v.found && v.epoch == c.Epoch
	}
	return false // no lock is held
}

// refusal is the index of the first condition that does not hold, or -1.
func (m *modelState) refusal(conditions []Condition) int {
	return slices.IndexFunc(conditions, func(c Condition) bool { return !m.holds(&c) })
}

// repeated is the state of a request that was sent before, or zero. An error of a request with the same id and another hash is reused.
func (m *modelState) repeated(r *Request) (known *modelRequest, reused bool) {
	if r == nil || m.requests[r.ID] == nil {
		return nil, false
	}
	known = m.requests[r.ID]
	return known, known.state != OutcomeCancelled && known.sent.Hash != r.Hash
}

// invoke is what an operation makes of a version, and whether it applies. The reason is empty unless it is an error.
func (v modelVersion) invoke(op *Invoke) (now modelVersion, applied bool, reason string) {
	computes := true
	now = modelVersion{found: true, value: v.value, deadline: v.deadline}
	switch applied = true; op.Kind {
	case InvokeAdd, InvokeMin, InvokeMax:
		now.value, reason = v.compute(op)
	case InvokeAppend:
		now.value += string(op.Operand)
	case InvokeTouch:
		applied = v.found
	case InvokePersist:
		applied, now.deadline = v.deadline != 0, 0
	case InvokeGetAndDelete:
		return modelVersion{}, true, ""
	default:
		computes, now.value = false, string(op.Operand)
		applied = op.Kind == InvokeGetAndSet || op.Kind == InvokePutIfAbsent && !v.found || op.Kind == InvokeCompareSet && v.found && v.value == string(op.Expect)
	}
	if !applied {
		return v, false, ""
	}
	if op.ExpiresAt != 0 || !computes {
		now.deadline = op.ExpiresAt
	}
	return now, true, reason
}

func (v modelVersion) compute(op *Invoke) (value, reason string) {
	n, err := strconv.ParseInt(v.value, 10, 64)
	switch {
	case v.found && err != nil:
		return "", "no number"
	case op.Kind == InvokeAdd:
		if sum := new(big.Int).Add(big.NewInt(n), big.NewInt(op.Delta)); !sum.IsInt64() {
			return "", "overflow"
		}
		if n += op.Delta; op.Bounded && (n < op.Min || n > op.Max) {
			return "", "out of bounds"
		}
	case !v.found || op.Kind == InvokeMin && op.Delta < n || op.Kind == InvokeMax && op.Delta > n:
		n = op.Delta
	}
	return strconv.FormatInt(n, 10), ""
}
