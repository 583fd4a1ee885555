// Package invariants compiles assertions into builds with the tag `invariants`.
//
// An expensive assertion is inside `if invariants.Enabled { ... }`. Enabled is a constant, so a build without the
// tag has neither the branch nor the code in it. In a build with the tag, a broken invariant panics (Fail).
//
// In a build without the tag, the assertions that cost nothing remain. They do not panic: the store stops (fail-stop),
// so that what was acknowledged stays on disk as it is. Bad input never panics in any build.
//
// The package imports no other package of the project, so that every layer may use it.
package invariants

import (
	"fmt"
	"os"
)

// Fail panics because a condition does not hold. It is called inside `if Enabled` and the test of the condition, so
// that an assertion that holds allocates nothing. It writes the message to standard error first, because a deferred
// function may wait for ever for a lock that the panic does not release.
func Fail(format string, args ...any) {
	message := "broken invariant: " + fmt.Sprintf(format, args...)
	fmt.Fprintln(os.Stderr, message)
	panic(message)
}
