/** A part of the page that may fail without the rest. */
import { Component, type ComponentChildren } from 'preact';

interface GuardProps {
  /** Shown instead of what failed. */
  instead: (error: unknown) => ComponentChildren;
  /** What failed is tried again when this changes. */
  of?: unknown;
  children: ComponentChildren;
}

export class Guard extends Component<GuardProps, { failure?: { error: unknown; of: unknown } }> {
  override state: { failure?: { error: unknown; of: unknown } } = {};

  override componentDidCatch(error: unknown): void {
    this.setState({ failure: { error, of: this.props.of } });
  }

  override render({ instead, of, children }: GuardProps): ComponentChildren {
    const { failure } = this.state;
    return failure && failure.of === of ? instead(failure.error) : children;
  }
}
