import './style.css';
import { render } from 'preact';
import { App } from './app.js';
import { follow } from './live.js';
import { begin } from './server.js';
import { applyTheme } from './ui/theme.js';

applyTheme();
begin();
follow();
render(<App />, document.getElementById('app')!);
