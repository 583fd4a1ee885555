package backup

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/objectstore"
)

// A server that stops ends its backup, and waits for that: a target that does not answer must not hold it up.
func TestACancelledBackupEndsThoughItsTargetHangs(t *testing.T) {
	f := newFixture(t)
	f.write(100)
	ctx, cancel := context.WithCancel(t.Context())
	f.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Prefix: f.dir + "/base/parts", Kind: objectstore.Slow})
	hanging := f.target.Inject(objectstore.Fault{Op: objectstore.OpDelete, Kind: objectstore.Slow})
	ended := make(chan error, 1)
	go func() {
		_, err := Create(ctx, f.store, f.target, Options{lease: leaseTimes{release: time.Millisecond}})
		ended <- err
	}()
	time.AfterFunc(5*time.Millisecond, cancel)
	select {
	case err := <-ended:
		wantError(t, err, context.Canceled)
	case <-time.After(time.Minute):
		t.Fatal("the backup has not ended")
	}
	if f.target.Fired(hanging) > 1 {
		t.Fatalf("%d deletions", f.target.Fired(hanging))
	}
}

// The same after the manifest was created: it is removed if the parts cannot be looked up. While the job goes on, that takes as long as it takes.
func TestACancelledBackupEndsThoughItsManifestCannotBeRemoved(t *testing.T) {
	for _, cancelled := range []bool{true, false} {
		f := newFixture(t)
		f.write(100)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		created, answers := make(chan struct{}), make(chan struct{})
		creating := f.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Prefix: f.dir + "/base/manifests", Kind: objectstore.Slow, Until: created})
		ended := make(chan error, 1)
		go func() {
			_, err := Create(ctx, f.store, f.target, Options{lease: leaseTimes{release: time.Millisecond}})
			ended <- err
		}()
		awaitFired(f.target, creating)
		lookup := objectstore.Fault{Op: objectstore.OpRead, Prefix: f.dir + "/base/parts", Kind: objectstore.FailForGood}
		if cancelled {
			lookup.Kind = objectstore.Slow // until the context ends
		}
		looking := f.target.Inject(lookup)
		removing := f.target.Inject(objectstore.Fault{Op: objectstore.OpDelete, Prefix: f.dir + "/base/manifests", Kind: objectstore.Slow, Until: answers})
		close(created)
		awaitFired(f.target, looking)
		if cancelled {
			cancel()
		} else {
			awaitFired(f.target, removing)
			time.Sleep(10 * time.Millisecond) // many times the bound
			close(answers)
		}
		select {
		case err := <-ended:
			if errors.Is(err, context.Canceled) != cancelled || err == nil {
				t.Fatalf("cancelled %v: %v", cancelled, err)
			}
		case <-time.After(time.Minute):
			t.Fatal("the backup has not ended")
		}
		if names := f.objects("base/manifests"); f.target.Fired(removing) != 1 || !cancelled && len(names) > 0 {
			t.Fatalf("cancelled %v: %d removals; the target has %v", cancelled, f.target.Fired(removing), names)
		}
	}
}

// awaitFired waits until a fault has fired.
func awaitFired(target *objectstore.Faulty, rule *objectstore.Fault) {
	for target.Fired(rule) == 0 {
		time.Sleep(time.Millisecond)
	}
}
