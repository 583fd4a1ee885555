package peers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	etcdpb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// feed opens watches. It speaks the servers' own protocols: the clients read ahead of their consumers, so that no watch of
// theirs would ever stall. Its methods may be called from many goroutines.
type feed interface {
	// watch opens one stream with a watch for each of the keys, or with one of everything if there are none. It returns when the
	// watches exist. The stream ends with ctx, and is stalled for as long as its receive is not called.
	watch(ctx context.Context, keys [][]byte) (changes, error)
	// lagging counts the watches that the server does not serve as commits come.
	lagging(ctx context.Context) (int, error)
	// delivered is how many events the server has taken for its watches so far; always 0 if it does not say.
	delivered(ctx context.Context) (float64, error)
	close() error
}

// changes is a stream of watches.
type changes interface {
	// receive waits for the next message and visits its puts.
	receive(visit func(change) error) error
}

// change is a put.
type change struct {
	key, value []byte
	epoch      uint64    // of its commit; etcd's revision
	committed  time.Time // by the server's clock, zero if it does not say
}

// streamsPerConnection leaves room below EpochKV's limit of 1,024.
const streamsPerConnection = 250

// connections spread streams.
type connections struct {
	all []*grpc.ClientConn
}

func dialConnections(address string, streams int, options ...grpc.DialOption) (*connections, error) {
	options = append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))
	var c connections
	for range streams/streamsPerConnection + 1 {
		conn, err := grpc.NewClient("passthrough:///"+address, options...)
		if err != nil {
			return nil, errors.Join(err, c.close())
		}
		c.all = append(c.all, conn)
	}
	return &c, nil
}

func (c *connections) of(stream int) *grpc.ClientConn { return c.all[stream%len(c.all)] }

func (c *connections) close() (err error) {
	for _, conn := range c.all {
		err = errors.Join(err, conn.Close())
	}
	return err
}

// feedDialer makes the feed of a server for so many streams.
type feedDialer func(s *server, streams int) (feed, error)

// epochKVFeed speaks to kvserver. Streams are numbered by the one goroutine that opens them.
type epochKVFeed struct {
	*connections
	server *server
	opened int
}

func dialEpochKVConnections(s *server, streams int) (*connections, error) {
	return dialConnections(s.place.address, streams, grpc.WithDefaultCallOptions(grpc.ForceCodecV2(pb.NewCodec())))
}

func dialEpochKVFeed(s *server, streams int) (feed, error) {
	c, err := dialEpochKVConnections(s, streams)
	return &epochKVFeed{connections: c, server: s}, err
}

func (f *epochKVFeed) watch(ctx context.Context, keys [][]byte) (changes, error) {
	var ranges []*pb.KeyRange
	for _, key := range keys {
		ranges = append(ranges, &pb.KeyRange{Start: key, End: append(slices.Clone(key), 0)})
	}
	return f.watchAfter(ctx, nil, ranges)
}

// watchAfter opens a watch for each range, which begins after an epoch, or now if that is nil.
func (f *epochKVFeed) watchAfter(ctx context.Context, after *uint64, ranges []*pb.KeyRange) (changes, error) {
	if len(ranges) == 0 {
		ranges = []*pb.KeyRange{{}}
	}
	f.opened++
	stream, err := pb.NewFeedServiceClient(f.of(f.opened)).Watch(ctx)
	if err != nil {
		return nil, err
	}
	for id := range ranges {
		create := &pb.CreateWatch{
			WatchId: uint64(id), Ranges: ranges[id : id+1], Values: pb.WatchValues_WATCH_VALUES_NEW, OnGap: pb.OnGap_ON_GAP_FAIL,
		}
		if after != nil {
			create.Start = &pb.CreateWatch_AfterEpoch{AfterEpoch: *after}
		}
		if err := stream.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: create}}); err != nil {
			return nil, err
		}
	}
	for range ranges {
		response, err := stream.Recv()
		if err != nil {
			return nil, err
		}
		if response.GetCreated() == nil {
			return nil, fmt.Errorf("watch: got %v, want that it was created", response)
		}
	}
	return epochKVChanges{stream}, nil
}

func (f *epochKVFeed) lagging(ctx context.Context) (n int, err error) {
	list, err := pb.NewAdminServiceClient(f.of(0)).ListWatches(ctx, &pb.ListWatchesRequest{})
	for _, w := range list.GetWatches() {
		if w.GetState() == pb.WatchInfo_STATE_LAGGING {
			n++
		}
	}
	return n, err
}

func (f *epochKVFeed) delivered(ctx context.Context) (float64, error) {
	return metric(ctx, f.server.place.second, "kvserver_feed_events_total")
}

type epochKVChanges struct {
	grpc.BidiStreamingClient[pb.WatchRequest, pb.WatchResponse]
}

// commits waits for the next message.
func (c epochKVChanges) commits() ([]*pb.ChangedCommit, error) {
	response, err := c.Recv()
	if err != nil {
		return nil, err
	}
	if ended := response.GetEnded(); ended != nil {
		return nil, fmt.Errorf("watch: ended: %v", ended.GetError().GetMessage())
	}
	return response.GetChanges().GetCommits(), nil
}

func (c epochKVChanges) receive(visit func(change) error) error {
	commits, err := c.commits()
	if err != nil {
		return err
	}
	for _, commit := range commits {
		var committed time.Time
		if t := commit.GetTime(); t != nil {
			committed = t.AsTime()
		}
		for _, event := range commit.GetEvents() {
			if event.GetKind() != pb.EventKind_EVENT_KIND_SET {
				continue
			}
			if err := visit(change{event.GetKey(), event.GetValue(), commit.GetEpoch(), committed}); err != nil {
				return err
			}
		}
	}
	return nil
}

// etcdFeed speaks to etcd.
type etcdFeed struct {
	*connections
	server *server
	opened int
}

func dialEtcdFeed(s *server, streams int) (feed, error) {
	c, err := dialConnections(s.place.address, streams)
	return &etcdFeed{connections: c, server: s}, err
}

func (f *etcdFeed) watch(ctx context.Context, keys [][]byte) (changes, error) {
	f.opened++
	stream, err := etcdpb.NewWatchClient(f.of(f.opened)).Watch(ctx)
	if err != nil {
		return nil, err
	}
	all := []*etcdpb.WatchCreateRequest{{Key: []byte{0}, RangeEnd: []byte{0}}}
	if len(keys) > 0 {
		all = nil
	}
	for _, key := range keys {
		all = append(all, &etcdpb.WatchCreateRequest{Key: key})
	}
	for _, one := range all {
		request := &etcdpb.WatchRequest{RequestUnion: &etcdpb.WatchRequest_CreateRequest{CreateRequest: one}}
		if err := stream.Send(request); err != nil {
			return nil, err
		}
	}
	for range all {
		response, err := stream.Recv()
		if err != nil {
			return nil, err
		}
		if !response.GetCreated() {
			return nil, fmt.Errorf("watch: got %v, want that it was created", response)
		}
	}
	return etcdChanges{stream}, nil
}

func (f *etcdFeed) lagging(ctx context.Context) (int, error) {
	n, err := metric(ctx, f.server.place.address, "etcd_debugging_mvcc_slow_watcher_total")
	return int(n), err
}

func (*etcdFeed) delivered(context.Context) (float64, error) { return 0, nil }

type etcdChanges struct{ etcdpb.Watch_WatchClient }

func (c etcdChanges) receive(visit func(change) error) error {
	response, err := c.Recv()
	if err != nil {
		return err
	}
	if response.GetCanceled() {
		return fmt.Errorf("watch: canceled: %s", response.GetCancelReason())
	}
	for _, event := range response.GetEvents() {
		if err := visit(change{key: event.GetKv().GetKey(), value: event.GetKv().GetValue(), epoch: uint64(event.GetKv().GetModRevision())}); err != nil {
			return err
		}
	}
	return nil
}
