package e2e

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"testing"
)

// startResidentMax is the most memory that a server with an empty store and default sizes takes at start; see docs/operations.md.
const startResidentMax = 60 << 20

var residentLine = regexp.MustCompile(`VmHWM:\s+(\d+) kB`)

// TestServerStartsSmall: memory is taken when data needs it. The figure is the most that was resident.
func TestServerStartsSmall(t *testing.T) {
	p := mustRun(t, mustBuild(t), t.TempDir())
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		t.Skip("the system does not tell: ", err)
	}
	match := residentLine.FindSubmatch(status)
	if match == nil {
		t.Fatalf("no peak of resident memory in\n%s", status)
	}
	kib, err := strconv.Atoi(string(match[1]))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d KiB", kib)
	if kib<<10 > startResidentMax {
		t.Errorf("an empty server takes %d MiB, at most %d are allowed", kib>>10, startResidentMax>>20)
	}
	p.kill(t)
}
