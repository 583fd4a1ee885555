package client

import (
	"context"

	"google.golang.org/grpc"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// Verify makes the server check its files while it works, at most so many pages per second (0: no
// limit). Progress, if not nil, is called several times a second. Only ctx bounds the call. Damage
// is in the report and is not an error.
func (c *Client) Verify(ctx context.Context, pagesPerSecond uint32, progress func(*kvpb.VerifyProgress)) (*kvpb.VerifyReport, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.admin.Verify(ctx, &kvpb.VerifyRequest{PagesPerSecond: pagesPerSecond})
	if err != nil {
		return nil, newError(err)
	}
	return untilResult(stream, (*kvpb.VerifyResponse).GetReport, (*kvpb.VerifyResponse).GetProgress, progress)
}

// untilResult returns the result with which a stream ends. Progress, if not nil, is called with what comes before.
func untilResult[Response, Result, Progress any](
	stream grpc.ServerStreamingClient[Response], result func(*Response) *Result, progressIn func(*Response) *Progress, progress func(*Progress),
) (*Result, error) {
	for {
		response, err := stream.Recv()
		if err != nil {
			return nil, newError(err)
		}
		if r := result(response); r != nil {
			return r, nil
		}
		if progress != nil {
			progress(progressIn(response))
		}
	}
}

// Checkpoint makes the server merge everything committed so far into its data file. Only ctx bounds
// the call.
func (c *Client) Checkpoint(ctx context.Context) (*kvpb.CheckpointResponse, error) {
	response, err := c.admin.Checkpoint(ctx, &kvpb.CheckpointRequest{})
	if err != nil {
		return nil, newError(err)
	}
	return response, nil
}

// Clock returns the time by the server's clock. With accept, the clock adopts the system's time first, if that is later.
func (c *Client) Clock(ctx context.Context, accept bool) (*kvpb.ClockResponse, error) {
	return call(ctx, c, repeatability(!accept), c.admin.Clock, &kvpb.ClockRequest{Accept: accept})
}

// SlowRequests returns the slowest requests of the last hour that the server has kept, slowest first, with where their
// time went; at most limit, all of them for 0. With remove, the server keeps none of them afterwards.
func (c *Client) SlowRequests(ctx context.Context, limit uint32, remove bool) (*kvpb.SlowRequestsResponse, error) {
	return call(ctx, c, repeatability(!remove), c.admin.SlowRequests, &kvpb.SlowRequestsRequest{Limit: limit, Clear: remove})
}

// ReloadTLS lets the server read the files of its certificates again.
func (c *Client) ReloadTLS(ctx context.Context) (*kvpb.ReloadTLSResponse, error) {
	return call(ctx, c, !safe, c.admin.ReloadTLS, &kvpb.ReloadTLSRequest{})
}

// SetConfig changes an option of the server while it runs. The change lasts until the server ends, or reads its configuration again.
func (c *Client) SetConfig(ctx context.Context, name, value string) (*kvpb.ConfigChange, error) {
	response, err := call(ctx, c, !safe, c.admin.SetConfig, &kvpb.SetConfigRequest{Name: name, Value: value})
	if err != nil {
		return nil, err
	}
	return response.GetChange(), nil
}

// ReloadConfig lets the server read its configuration file again.
func (c *Client) ReloadConfig(ctx context.Context) (*kvpb.ReloadConfigResponse, error) {
	return call(ctx, c, !safe, c.admin.ReloadConfig, &kvpb.ReloadConfigRequest{})
}

// FinalizeUpgrade raises the store to the newest feature level of the server. Earlier versions of the
// server refuse the store from then on. Only ctx bounds the call.
func (c *Client) FinalizeUpgrade(ctx context.Context) (*kvpb.FinalizeUpgradeResponse, error) {
	response, err := c.admin.FinalizeUpgrade(ctx, &kvpb.FinalizeUpgradeRequest{})
	if err != nil {
		return nil, newError(err)
	}
	return response, nil
}

// ResizeCache changes the size of the server's page cache until it restarts, and returns the
// previous size.
func (c *Client) ResizeCache(ctx context.Context, bytes uint64) (before uint64, err error) {
	response, err := call(ctx, c, !safe, c.admin.ResizeCache, &kvpb.ResizeCacheRequest{CacheBytes: bytes})
	if err != nil {
		return 0, err
	}
	return response.GetPreviousBytes(), nil
}

// Space returns what uses the space in the data file. Only ctx bounds the call.
func (c *Client) Space(ctx context.Context, request *kvpb.SpaceRequest) (*kvpb.SpaceResponse, error) {
	response, err := c.admin.Space(ctx, request)
	if err != nil {
		return nil, newError(err)
	}
	return response, nil
}
