//go:build invariants

package mvcc

// PauseReserved makes the session's next commit call hold once its epoch is reserved and nothing of
// it is installed: no commit after it becomes visible meanwhile. It is for tests of what others see
// then, and only in builds with the tag `invariants`.
func (x *Session) PauseReserved(hold func()) {
	x.committing.atStep = func(at commitStep) {
		if at == stepReserved {
			x.committing.atStep = nil
			hold()
		}
	}
}
