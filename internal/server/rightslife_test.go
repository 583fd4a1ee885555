package server

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// era is what a user may do from when its change was asked for until the next one was answered: of requests that end and begin within
// that time each may have been decided by it.
type era struct {
	from, until time.Time // until is zero for the last one
	known       bool      // the user is not disabled
	may         [4]bool   // each key
}

func (e *era) overlaps(begin, end time.Time) bool {
	return !e.from.After(end) && (e.until.IsZero() || !e.until.Before(begin))
}

// explains reports whether the answer to a request for a key is right in this era.
func (e *era) explains(code codes.Code, key int) bool {
	switch code { //nolint:exhaustive // there are no others
	case codes.OK, codes.Aborted: // by a conflict with another request
		return e.known && e.may[key]
	case codes.PermissionDenied:
		return e.known && !e.may[key]
	case codes.Unauthenticated:
		return !e.known
	}
	return false
}

// answeredRequest is a request of the user, and its answer.
type answeredRequest struct {
	form       string
	key        int
	begin, end time.Time
	err        error
}

// TestRequestsAreDecidedByTheRightsOfTheirTime: a user sends requests of all forms while its role is changed, it is disabled, and its role is
// taken away. Each answer is explained by rights that were in force between the request and the answer.
func TestRequestsAreDecidedByTheRightsOfTheirTime(t *testing.T) {
	seed := testseed.Base(t)
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		t.Run(string(transport), func(t *testing.T) {
			h, client, ann, _ := startWithUsers(t, vfs.NewMem(), func(c *config.Config) { c.Transport = transport })
			_, err := client.Enable(with(t, ann), &pb.EnableRequest{})
			must(t, err)
			_, err = client.UpdateUser(with(t, ann), &pb.UpdateUserRequest{Name: "bob", Limits: new(pb.UserLimits)})
			must(t, err)
			made, err := client.CreateToken(with(t, ann), &pb.CreateTokenRequest{User: "bob"})
			must(t, err)
			eras := []*era{{from: time.Now(), known: true}}
			var mu sync.Mutex
			var all []answeredRequest
			var asking sync.WaitGroup
			done := make(chan struct{})
			for i := range 3 {
				rng, c := rand.New(rand.NewPCG(seed, uint64(i))), clientsOf(h.dial(t))
				asking.Go(func() {
					for {
						select {
						case <-done:
							return
						default:
						}
						r := askAny(with(t, made.GetToken()), rng, c)
						mu.Lock()
						all = append(all, r)
						mu.Unlock()
					}
				})
			}
			rng := rand.New(rand.NewPCG(seed, 65))
			for range 30 {
				eras = append(eras, changeRights(t, rng, client, ann, eras[len(eras)-1]))
			}
			close(done)
			asking.Wait()
			for _, r := range all {
				explained := false
				for _, e := range eras {
					explained = explained || e.overlaps(r.begin, r.end) && e.explains(status.Code(r.err), r.key)
				}
				if !explained {
					t.Errorf("%s of key %d: %v", r.form, r.key, r.err)
				}
			}
			t.Logf("%d requests", len(all))
		})
	}
}

// changeRights makes a random change, and returns what is in force from its beginning on.
func changeRights(t *testing.T, rng *rand.Rand, client pb.AuthServiceClient, ann string, last *era) *era {
	t.Helper()
	next := &era{from: time.Now(), known: last.known, may: last.may}
	var err error
	if rng.IntN(3) == 0 {
		disabled := next.known
		next.known = !next.known
		_, err = client.UpdateUser(with(t, ann), &pb.UpdateUserRequest{Name: "bob", Disabled: &disabled})
	} else {
		role := &pb.Role{Name: "reader"}
		for key := range next.may {
			if next.may[key] = rng.IntN(2) == 0; next.may[key] {
				name := []byte(keyOfEra(key))
				role.Grants = append(role.Grants, &pb.KeyGrant{Start: name, End: append(name, 0), Read: true, Write: true, Lease: true})
			}
		}
		_, err = client.UpdateRole(with(t, ann), &pb.UpdateRoleRequest{Role: role})
	}
	must(t, err)
	last.until = time.Now()
	time.Sleep(time.Duration(rng.IntN(2)) * time.Millisecond)
	return next
}

func keyOfEra(key int) string { return fmt.Sprintf("k%d", key) }

// askAny sends a request for a key.
func askAny(ctx context.Context, rng *rand.Rand, c *clients) answeredRequest {
	r := answeredRequest{key: rng.IntN(4)}
	name := keyOfEra(r.key)
	forms := []struct {
		name string
		call func(context.Context, *clients) error
	}{
		{"put", func(ctx context.Context, c *clients) error {
			_, err := c.kv.Put(ctx, &pb.PutRequest{Key: []byte(name), Value: []byte("v")})
			return err
		}},
		{"get", func(ctx context.Context, c *clients) error {
			_, err := c.kv.Get(ctx, &pb.GetRequest{Key: []byte(name)})
			return err
		}},
		{"delete range", func(ctx context.Context, c *clients) error {
			_, err := c.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Range: &pb.KeyRange{Start: []byte(name), End: []byte(name + "\x00")}})
			return err
		}},
		{"execute", executed(&pb.ExecuteRequest{ThenOperations: []*pb.Operation{{Operation: &pb.Operation_Invoke{Invoke: appended(name)}}}})},
		{"pipelined put", inPipeline(&pb.PipelineRequest{Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte(name), Value: []byte("v")}}})},
		{"transaction", transacted(&pb.TransactRequest{Request: &pb.TransactRequest_Write{Write: &pb.WriteRequest{Mutations: []*pb.Mutation{mutation(name, 0)}}}})},
		{"scan", scanned(&pb.ScanRequest{Range: &pb.KeyRange{Start: []byte(name), End: []byte(name + "\x00")}})},
		{"lock", func(ctx context.Context, c *clients) error {
			_, err := c.lock.GetLock(ctx, &pb.GetLockRequest{Name: []byte(name)})
			return err
		}},
	}
	form := forms[rng.IntN(len(forms))]
	r.form, r.begin = form.name, time.Now()
	r.err = form.call(ctx, c)
	r.end = time.Now()
	return r
}
