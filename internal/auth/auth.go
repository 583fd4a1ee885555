// Package auth decides what a user may touch.
//
//	request ──► Footprint: key ranges read, written and leased, administrative actions
//	                │
//	Identity ──► Table ──► User ──► Rights.Check(footprint) ──► nil, or *DeniedError
//	of a client  of one auth revision    sorted, merged ranges
//
// Terms. A footprint is everything that a request may read, write or do, computed before any of it happens. A right is
// to read, to write, or to lease the keys of a range, or to take an administrative action. A grant gives rights; a role is
// a list of grants; a user has roles. The rights of a user are those of all of its roles, compiled: the ranges of each right
// are sorted and merged, so that a check is a binary search. A table has the users of one auth revision, which is the epoch
// of the last commit that changed users, roles, tokens, or whether they are checked at all.
//
// Invariants:
//   - A Table, its users' Rights, and a Footprint under check are never changed. A change publishes a new table.
//   - A request is permitted only if each of its ranges is within one merged range of the same right: ranges that only
//     together contain it have been merged, because they touch.
//   - A refusal says which right is missing. It names a key only if the request itself did.
//   - A check allocates nothing, unless it refuses.
//
// The package knows neither the store nor the network: package users keeps the records and authenticates clients.
package auth

import (
	"errors"
	"fmt"
	"strings"
)

// Right is a right to the keys of a range, or to administrative actions.
type Right uint8

// Rights.
const (
	RightRead Right = iota
	RightWrite
	RightLease
	RightAdmin
	keyRights = int(RightAdmin) // those to keys come first
)

var rightNames = [...]string{RightRead: "read", RightWrite: "write", RightLease: "lease", RightAdmin: "admin"}

// String is the right's name in records of errors and in kvctl.
func (r Right) String() string { return rightNames[r] }

// Actions is a set of administrative actions.
type Actions uint32

// Administrative actions. The bits are stored.
const (
	ActionObserve Actions = 1 << iota // see the state, metrics, and what runs
	ActionOperate                     // change the state: checkpoints, upgrades, caches; end what others run
	ActionBackup                      // read everything: backups, archives, hashes, verification
	ActionUsers                       // change users, roles and tokens
	ActionDebug                       // profiles, and the log of requests
	actionsEnd
	// ActionsAll is every action.
	ActionsAll = actionsEnd - 1
)

var actionNames = []string{"observe", "operate", "backup", "users", "debug"}

// Names are the names of the actions in the set.
func (a Actions) Names() (names []string) {
	for i, name := range actionNames {
		if a&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return names
}

// String is the names with commas.
func (a Actions) String() string { return strings.Join(a.Names(), ",") }

// ParseAction is the action with a name, or all with the name "all"; zero if there is none.
func ParseAction(name string) Actions {
	if name == "all" {
		return ActionsAll
	}
	for i, n := range actionNames {
		if n == name {
			return 1 << i
		}
	}
	return 0
}

// Errors of clients that are not known, whatever they ask for.
var (
	// ErrUnauthenticated means that a request has no credentials, or that they are wrong: it does not say which.
	ErrUnauthenticated = errors.New("the credentials are missing or wrong")
	// ErrTokenExpired means that the token was right until its time was over.
	ErrTokenExpired = errors.New("the token has expired")
)

// DeniedError is a right that a request needs and its user does not have.
type DeniedError struct {
	User   string
	Right  Right
	Range  Range   // of RightRead, RightWrite and RightLease; empty and Hidden if the client may not know it
	Any    bool    // the right is needed to any key at all
	Action Actions // of RightAdmin: what is missing
}

func (e *DeniedError) Error() string {
	switch {
	case e.Right == RightAdmin:
		return fmt.Sprintf("user %q has no right to the administrative actions: %v", e.User, e.Action)
	case e.Any:
		return fmt.Sprintf("user %q has the %v right to no key", e.User, e.Right)
	case e.Range.Hidden:
		return fmt.Sprintf("user %q lacks the %v right to a key that the request would touch", e.User, e.Right)
	}
	return fmt.Sprintf("user %q lacks the %v right to %v", e.User, e.Right, &e.Range)
}
