package harness

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"
)

// vault notes how often it is closed, in its directory, which must be there still.
type vault struct {
	dir    string
	closed *atomic.Int32
}

func (v vault) Close() error { v.closed.Add(1); return os.WriteFile(v.dir+"/last", nil, 0o600) }

// vaulted is a scenario whose only arm uses a vault.
func vaulted(name, stage string, v func(dir string) (vault, error), run func(*Run) error) Scenario {
	return Scenario{
		Name: name, Unit: "naps", Axis: Axis{Name: "n", Points: []int{1}}, Size: 1000, Stage: stage,
		Arms: []Arm{{Name: "arm", Run: func(r *Run) error {
			_, err := Shared(r, "vault", v)
			return errors.Join(err, run(r))
		}}},
	}
}

func noNap(r *Run) error {
	return errors.Join(r.Time(1, func() error { return nil }), r.Verified(1, 1))
}

func TestWhatIsSharedIsMadeOncePerStageAndClosed(t *testing.T) {
	var opened, closed atomic.Int32
	v := func(dir string) (vault, error) { opened.Add(1); return vault{dir, &closed}, nil }
	scenarios := []Scenario{
		vaulted("a", "one", v, noNap), vaulted("b", "one", v, noNap), vaulted("c", "two", v, noNap), vaulted("d", "", v, noNap), vaulted("e", "", v, noNap),
	}
	if _, err := execute(t, Options{Smoke: true, Budget: time.Minute}, scenarios...); err != nil {
		t.Fatal(err)
	}
	if opened.Load() != 4 || closed.Load() != 4 {
		t.Errorf("opened %d times, closed %d times; want one for the first two, and one for each other", opened.Load(), closed.Load())
	}
}

func TestWhatIsSharedEndsWithABenchmarkThatFails(t *testing.T) {
	var closed atomic.Int32
	var last string
	v := func(dir string) (vault, error) { last = dir; return vault{dir, &closed}, nil }
	failed := errors.New("bad")
	_, err := execute(t, Options{Smoke: true}, vaulted("a", "", v, func(*Run) error { return failed }))
	if !errors.Is(err, failed) {
		t.Errorf("error %v", err)
	}
	if _, err := os.Stat(last); closed.Load() != 1 || !os.IsNotExist(err) {
		t.Errorf("closed %d times, directory: %v; want it closed and gone", closed.Load(), err)
	}
}

func TestTimeSpentOnSharedThingsIsNoPartOfARound(t *testing.T) {
	v := func(dir string) (vault, error) {
		time.Sleep(300 * time.Millisecond)
		return vault{dir, new(atomic.Int32)}, nil
	}
	outcomes, err := execute(t, Options{Budget: 1500 * time.Millisecond}, vaulted("a", "", v, noNap))
	if err != nil {
		t.Fatal(err)
	}
	// Taken for a cost of each round, it would not fit once into a sixth of what is left, and the size were as small as can be.
	if outcomes[0].Size < 1000/shrinkMax*2 {
		t.Errorf("size %d: the shared thing was taken for a cost of each round", outcomes[0].Size)
	}
}

func TestAnAbsentArmIsLeftOutAndNamed(t *testing.T) {
	var order []string
	s, tries := sleepers(t, &order), 0
	s.Arms = append(s.Arms, Arm{Name: "peer", Run: func(*Run) error { tries++; return fmt.Errorf("%w: not installed", ErrAbsent) }})
	s.Figures = append(s.Figures, Figure{Arm: "fast", Against: "peer", AtLeast: 1})
	outcomes, err := execute(t, Options{Budget: time.Minute}, s)
	if err != nil {
		t.Fatal(err)
	}
	if o := outcomes[0]; tries != 1 || o.Absent["peer"] != "absent: not installed" || len(o.Figures) != 3 {
		t.Errorf("%d tries, absent %v, %d verdicts; want one, the reason, and no figure about the peer", tries, o.Absent, len(o.Figures))
	}
}
