package mvcc

import "github.com/epochkv/epochkv/internal/invariants"

// commitStep is a point between two steps of a commit, at which tests stop it to see what other
// sessions see.
type commitStep uint8

const (
	stepLatched   commitStep = iota // the latches are held
	stepLookUp                      // the record of the request is read next
	stepWalked                      // what was read has not changed; the rounds follow
	stepChecked                     // nothing conflicts, nothing that was read has changed
	stepReserved                    // epoch and offset in the log are reserved
	stepCopied                      // the record is complete in the segment buffer
	stepInserted                    // the versions are in the memtable
	stepInstalled                   // visible may have passed the epoch
	stepReleased                    // the latches are released
)

// reached calls the session's hook in builds with the tag `invariants`, and is nothing in others.
func (x *Session) reached(step commitStep) {
	if invariants.Enabled && x.committing.atStep != nil {
		x.committing.atStep(step)
	}
}
